// Causal attention over a KV cache that is read in place.
//
// Work is cut by sequence, key head and block of query rows; a row is one head of one query, and the rows of a block
// share every reading of keys and values. Invariant: a row's bits follow from its query, its position and the keys and
// values that it sees; nothing that it does not see is even multiplied by zero.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "packed_rows.h"

namespace flashmoe {
namespace {

constexpr size_t kScratchBytes = size_t{3} << 20;  // for the scores of all threads together
constexpr size_t kThreadScratchBytes = size_t{512} << 10;  // stays in a core's second-level cache
constexpr size_t kMaxBlockRows = 64;
constexpr size_t kTileKeys = 64;  // values of so many keys stay in the first-level cache while the rows pass by
constexpr size_t kAheadRows = 8;  // a processor's own prefetch does not follow rows that lie pages apart

// Keys that a query sees; none for padding.
struct Range {
  size_t begin, end;
  bool is_empty() const { return begin >= end; }
  Range within(Range other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

Range range_of(const AttentionShape& shape, int32_t position) {
  if (position < 0 || static_cast<size_t>(position) >= shape.capacity) return {0, 0};
  const size_t end = static_cast<size_t>(position) + 1;
  return {shape.window != 0 && end > shape.window ? end - shape.window : 0, end};
}

struct Job {
  const Kernels& kernels;  // of the scores
  const Kernels& mixing;   // of all that follows
  size_t word;             // bytes
  const AttentionShape& shape;
  const float* q;
  const unsigned char* keys;
  const unsigned char* values;
  const int32_t* position;
  float* out;

  size_t group() const { return shape.num_heads / shape.num_key_heads; }
  size_t num_rows() const { return shape.num_queries * group(); }  // of one sequence and key head
  size_t stride() const { return shape.num_key_heads * shape.width; }
};

// The rows [first, last) of one sequence and key head.
class Block {
 public:
  Block(const Job& job, size_t sequence, size_t key_head, size_t first, size_t last)
      : job_(job), sequence_(sequence), key_head_(key_head), first_(first), count_(last - first), ranges_(count_) {
    keys_ = {job.shape.capacity, 0};
    for (size_t row = 0; row < count_; ++row) {
      const Range range = range_of(job.shape, job.position[query_of(row)]);
      ranges_[row] = range;
      if (!range.is_empty()) keys_ = {std::min(keys_.begin, range.begin), std::max(keys_.end, range.end)};
    }
  }

  void run() {
    if (keys_.is_empty()) {
      for (size_t row = 0; row < count_; ++row) std::fill_n(job_.out + offset(row), job_.shape.width, 0.0f);
      return;
    }
    const size_t stride = keys_.end - keys_.begin + kMaxLanes;
    scores_.reset(new float[count_ * stride]);
    score_rows_.resize(count_);
    for (size_t row = 0; row < count_; ++row) score_rows_[row] = scores_.get() + row * stride;
    score();
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(job_.shape.width)));
    for (size_t row = 0; row < count_; ++row) {
      const Range range = ranges_[row];
      if (!range.is_empty()) job_.mixing.softmax(score_of(row, range.begin), range.end - range.begin, scale);
    }
    mix();
  }

 private:
  size_t query_of(size_t row) const { return sequence_ * job_.shape.num_queries + (first_ + row) / job_.group(); }

  // Of a row in q and in out.
  size_t offset(size_t row) const {
    const size_t head = key_head_ * job_.group() + (first_ + row) % job_.group();
    return (query_of(row) * job_.shape.num_heads + head) * job_.shape.width;
  }

  const unsigned char* words_of(const unsigned char* cache, size_t key) const {
    const size_t at = (sequence_ * job_.shape.capacity + key) * job_.stride() + key_head_ * job_.shape.width;
    return cache + at * job_.word;
  }

  float* score_of(size_t row, size_t key) const { return score_rows_[row] + (key - keys_.begin); }

  void score() const {
    const PackedRows packed(job_.kernels, count_, job_.shape.width);
    std::vector<const void*> tokens(count_);
    for (size_t row = 0; row < count_; ++row) {
      job_.kernels.pack(job_.q + offset(row), job_.shape.width, packed.row(row));
      tokens[row] = packed.row(row);
    }
    ProductArgs args{};
    args.weights = words_of(job_.keys, keys_.begin);
    args.width = job_.shape.width;
    args.stride = job_.stride();
    args.ahead_bytes = kAheadRows / 2 * job_.stride() * job_.word;
    args.end = keys_.end - keys_.begin;
    args.x = tokens.data();
    args.num_tokens = count_;
    args.out = score_rows_.data();
    job_.kernels.products(args);
  }

  void mix() const {
    const size_t width = job_.mixing.packed_bytes(job_.shape.width) / sizeof(float), tile_words = kTileKeys * width;
    const size_t share = job_.mixing.mix_tokens;
    std::vector<float> sums(count_ * width);
    // Rows that few read stay where they are. Others are copied, for rows a page apart evict each other.
    const bool in_place = count_ <= share && width == job_.shape.width;
    const std::unique_ptr<unsigned char[]> tile(in_place ? nullptr : new unsigned char[tile_words * job_.word]());
    MixArgs args{};
    args.width = width;
    args.stride = in_place ? job_.stride() : width;
    args.ahead_rows = in_place ? kAheadRows : 0;
    for (size_t key = keys_.begin; key < keys_.end; key += kTileKeys) {
      const Range keys{key, std::min(key + kTileKeys, keys_.end)};
      args.values = in_place ? words_of(job_.values, key) : copy(keys, width, tile.get());
      for (size_t row = 0; row < count_; row += share) {
        mix_rows(args, keys, row, std::min(row + share, count_), sums.data());
      }
    }
    for (size_t row = 0; row < count_; ++row) {
      job_.mixing.unpack(sums.data() + row * width, job_.shape.width, job_.out + offset(row));
    }
  }

  // Values one behind the other, each padded with zeros to `width` words.
  const unsigned char* copy(Range keys, size_t width, unsigned char* tile) const {
    const size_t bytes = job_.shape.width * job_.word, ahead = kAheadRows * job_.stride() * job_.word;
    for (size_t key = keys.begin; key < keys.end; ++key) {
      const unsigned char* row = words_of(job_.values, key);
      // As an integer, for there may be no such row. A prefetch never faults.
      const uintptr_t next = reinterpret_cast<uintptr_t>(row) + ahead;
      for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(reinterpret_cast<const void*>(next + at), 0, 3);
      std::memcpy(tile + (key - keys.begin) * width * job_.word, row, bytes);
    }
    return tile;
  }

  // The keys that all of a few rows see are read for them together, the others for each that sees them.
  void mix_rows(MixArgs& args, Range keys, size_t first, size_t last, float* sums) const {
    Range common = keys;
    float* sums_of[kMaxMixTokens];
    const float* weights[kMaxMixTokens];
    for (size_t row = first; row < last; ++row) {
      common = common.within(ranges_[row]);
      sums_of[row - first] = sums + row * args.width;
      weights[row - first] = score_of(row, keys.begin);
    }
    const auto add = [&](Range range, size_t row, size_t num_rows) {
      if (range.is_empty()) return;
      args.begin = range.begin - keys.begin;
      args.end = range.end - keys.begin;
      args.weight = weights + (row - first);
      args.sums = sums_of + (row - first);
      args.num_tokens = num_rows;
      job_.mixing.mix(args);
    };
    if (common.is_empty()) common = {keys.end, keys.end};
    for (size_t row = first; row < last; ++row) add(ranges_[row].within({keys.begin, common.begin}), row, 1);
    add(common, first, last - first);
    for (size_t row = first; row < last; ++row) add(ranges_[row].within({common.end, keys.end}), row, 1);
  }

  const Job& job_;
  size_t sequence_, key_head_, first_, count_;
  std::vector<Range> ranges_;
  Range keys_;  // all that a row of the block sees lies within
  std::unique_ptr<float[]> scores_;
  std::vector<float*> score_rows_;
};

}  // namespace

void attend(Executor& executor, Isa isa, Dtype dtype, const AttentionShape& shape, const float* q, const void* keys,
            const void* values, const int32_t* position, float* out) {
  const Kernels& kernels = kernels_for(isa, dtype);
  const Kernels& mixing = kernels.mix != nullptr ? kernels : *avx512_kernels(dtype);
  const Job job{kernels, mixing, word_bytes(dtype), shape, q, static_cast<const unsigned char*>(keys),
                static_cast<const unsigned char*>(values), position, out};
  size_t longest = 0;
  for (size_t i = 0; i < shape.num_sequences * shape.num_queries; ++i) {
    longest = std::max(longest, range_of(shape, position[i]).end);
  }
  const size_t scratch = std::min(kScratchBytes / std::max<size_t>(executor.num_threads(), 1), kThreadScratchBytes);
  const size_t fitting = scratch / sizeof(float) / (longest + kMaxLanes);
  const size_t block_rows = std::clamp<size_t>(fitting, 1, kMaxBlockRows);
  const size_t blocks = ceil_div(job.num_rows(), block_rows);
  parallel_for(executor, shape.num_sequences * shape.num_key_heads * blocks, [&](size_t chunk) {
    const size_t first = chunk % blocks * block_rows, head = chunk / blocks;
    Block(job, head / shape.num_key_heads, head % shape.num_key_heads, first,
          std::min(first + block_rows, job.num_rows()))
        .run();
  });
}

}  // namespace flashmoe
