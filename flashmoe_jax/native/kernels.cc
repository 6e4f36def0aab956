#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "isa.h"
#include "packed_rows.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashmoe {
namespace {

// Tokens of a block stay in a core's second-level cache while all rows of weights pass by; a multiple of every tile.
constexpr size_t kBlockBytes = size_t{384} << 10;
constexpr size_t kTileTokens = 12;
constexpr size_t kMaxBlockTokens = 48;
// Tokens that are packed together, a bound for the temporary memory of a product with many of them.
constexpr size_t kMaxPackedBytes = size_t{4} << 20;
// A chunk of weights is long enough to be read in streams and short enough to even out the threads.
constexpr size_t kChunkBytes = size_t{256} << 10;
constexpr size_t kChunksPerThread = 4;
constexpr size_t kMinChunkBytes = size_t{32} << 10;  // times tokens: less is not worth another thread
constexpr size_t kChunkRowsMultiple = 4;

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#endif

size_t tokens_per_block(size_t packed_stride) {
  const size_t fitting = kBlockBytes / std::max<size_t>(packed_stride, 1) / kTileTokens * kTileTokens;
  return std::clamp(fitting, kTileTokens, kMaxBlockTokens);
}

// Tokens that meet the same weights.
struct Item {
  const unsigned char* weights;  // a matrix, or the record of an expert
  size_t first, count;           // in the arrays of pointers below
};

// Cuts `num_rows` rows of each item's matrix into chunks of about equal size.
struct Chunks {
  size_t rows_per_chunk, chunks_per_item, num_chunks;

  Chunks(const Executor& executor, const std::vector<Item>& items, size_t num_rows, size_t row_bytes) {
    const size_t num_items = items.size(), bytes = std::max<size_t>(row_bytes, 1);
    const size_t threads = std::max<size_t>(executor.num_threads(), 1);
    const size_t even = ceil_div(num_rows * num_items, threads * kChunksPerThread);
    const size_t least = ceil_div(kMinChunkBytes, bytes * items.front().count);
    const size_t rows = std::clamp(even, least, std::max(kChunkBytes / bytes, least));
    rows_per_chunk = ceil_div(std::max<size_t>(rows, 1), kChunkRowsMultiple) * kChunkRowsMultiple;
    chunks_per_item = ceil_div(num_rows, rows_per_chunk);
    num_chunks = chunks_per_item * num_items;
  }
};

struct ProductJob {
  const Kernels& kernels;
  Dtype dtype;
  size_t num_rows, width;
  const std::vector<Item>& items;
  const std::vector<const void*>& x;
  const std::vector<float*>& out;
  const float* scale;  // null or one per token
  size_t offset;       // of the matrix in the weights of an item, words
};

void run_products(Executor& executor, const ProductJob& job) {
  const size_t word = word_bytes(job.dtype);
  const Chunks chunks(executor, job.items, job.num_rows, job.width * word);
  parallel_for(executor, chunks.num_chunks, [&](size_t chunk) {
    const Item& item = job.items[chunk / chunks.chunks_per_item];
    const size_t begin = chunk % chunks.chunks_per_item * chunks.rows_per_chunk;
    ProductArgs args{};
    args.weights = item.weights + job.offset * word;
    args.width = args.stride = job.width;
    args.ahead_bytes = kAheadBytes;
    args.begin = begin;
    args.end = std::min(begin + chunks.rows_per_chunk, job.num_rows);
    args.x = job.x.data() + item.first;
    args.num_tokens = item.count;
    args.out = job.out.data() + item.first;
    args.scale = job.scale == nullptr ? nullptr : job.scale + item.first;
    job.kernels.products(args);
  });
}

// The feed-forward of the tokens `x` by their items' experts; out and scale as for products.
void run_experts(Executor& executor, const Kernels& kernels, const ExpertLayout& layout, const std::vector<Item>& items,
                 const std::vector<const void*>& x, const std::vector<float*>& out, const float* scale) {
  const size_t num_tokens = x.size(), hidden = layout.hidden, word = word_bytes(layout.dtype);
  std::unique_ptr<float[]> gated_sums(new float[num_tokens * hidden]);
  std::vector<float*> gated_rows(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) gated_rows[i] = gated_sums.get() + i * hidden;
  const Chunks chunks(executor, items, hidden, 2 * layout.width * word);
  parallel_for(executor, chunks.num_chunks, [&](size_t chunk) {
    const Item& item = items[chunk / chunks.chunks_per_item];
    const size_t begin = chunk % chunks.chunks_per_item * chunks.rows_per_chunk;
    GateUpArgs args{};
    args.gate = item.weights + layout.gate_offset * word;
    args.up = item.weights + layout.up_offset * word;
    args.width = layout.width;
    args.begin = begin;
    args.end = std::min(begin + chunks.rows_per_chunk, hidden);
    args.x = x.data() + item.first;
    args.num_tokens = item.count;
    args.out = gated_rows.data() + item.first;
    kernels.gate_up(args);
  });
  PackedRows packed(kernels, num_tokens, hidden);
  packed.pack(executor, num_tokens, [&](size_t i) { return gated_rows[i]; });
  std::vector<const void*> packed_rows(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) packed_rows[i] = packed.row(i);
  run_products(executor, {kernels, layout.dtype, layout.width, hidden, items, packed_rows, out, scale,
                          layout.down_offset});
}

// Appends items of at most `block` tokens for `count` tokens of the same weights.
void append_items(std::vector<Item>& items, const unsigned char* weights, size_t first, size_t count, size_t block) {
  for (size_t i = 0; i < count; i += block) items.push_back({weights, first + i, std::min(block, count - i)});
}

}  // namespace

const Kernels& kernels_for(Isa isa, Dtype dtype) {
  switch (isa == Isa::kAuto ? best_isa() : isa) {
    case Isa::kAvx512Bf16:
      return dtype == Dtype::kBfloat16 ? *avx512_bf16_kernels() : *avx512_kernels(dtype);
    case Isa::kAvx512:
      return *avx512_kernels(dtype);
    case Isa::kAvx2:
      return *avx2_kernels(dtype);
    default:
      return *portable_kernels(dtype);
  }
}

float gated(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::kAuto:
    case Isa::kPortable:
      return true;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return has_avx2();
    case Isa::kAvx512:
      return has_avx2() && __builtin_cpu_supports("avx512f");
    case Isa::kAvx512Bf16:
      return avx512_bf16_kernels() != nullptr && has_avx2() && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

Isa best_isa() {
  static const Isa best = [] {
    for (const Isa isa : {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2}) {
      if (isa_supported(isa)) return isa;
    }
    return Isa::kPortable;
  }();
  return best;
}

void matmul(Executor& executor, Isa isa, Dtype dtype, const float* x, const void* weights, float* out,
            size_t num_tokens, size_t num_rows, size_t width) {
  const Kernels& kernels = kernels_for(isa, dtype);
  const size_t stride = std::max<size_t>(kernels.packed_bytes(width), 1);
  const size_t block = tokens_per_block(stride);
  const size_t most = std::max(kMaxPackedBytes / stride / block, size_t{1}) * block;
  PackedRows packed(kernels, std::min(most, num_tokens), width);
  if (num_rows == 0) return;
  for (size_t first = 0; first < num_tokens; first += most) {
    const size_t count = std::min(most, num_tokens - first);
    packed.pack(executor, count, [&](size_t i) { return x + (first + i) * width; });
    std::vector<const void*> tokens(count);
    std::vector<float*> outputs(count);
    for (size_t i = 0; i < count; ++i) {
      tokens[i] = packed.row(i);
      outputs[i] = out + (first + i) * num_rows;
    }
    std::vector<Item> items;
    append_items(items, static_cast<const unsigned char*>(weights), 0, count, block);
    run_products(executor, {kernels, dtype, num_rows, width, items, tokens, outputs, nullptr, 0});
  }
}

void expert_ffn(Executor& executor, Isa isa, const ExpertLayout& layout, const float* x, const void* records,
                size_t record_words, const int32_t* row, const bool* active, float* out, size_t num_tokens,
                size_t num_ranks) {
  const Kernels& kernels = kernels_for(isa, layout.dtype);
  std::vector<size_t> pairs;
  for (size_t i = 0; i < num_tokens * num_ranks; ++i) {
    if (active[i]) pairs.push_back(i);
  }
  if (pairs.empty()) return;
  std::stable_sort(pairs.begin(), pairs.end(), [&](size_t a, size_t b) { return row[a] < row[b]; });
  PackedRows packed(kernels, num_tokens, layout.width);
  packed.pack(executor, num_tokens, [&](size_t i) { return x + i * layout.width; });
  std::vector<const void*> tokens(pairs.size());
  std::vector<float*> outputs(pairs.size());
  std::vector<Item> items;
  const size_t block = tokens_per_block(packed.stride());
  const size_t record_bytes = record_words * word_bytes(layout.dtype);
  for (size_t first = 0, end; first < pairs.size(); first = end) {
    for (end = first; end < pairs.size() && row[pairs[end]] == row[pairs[first]]; ++end) {
      tokens[end] = packed.row(pairs[end] / num_ranks);
      outputs[end] = out + pairs[end] * layout.width;
    }
    const auto* record = static_cast<const unsigned char*>(records) + static_cast<size_t>(row[pairs[first]]) * record_bytes;
    append_items(items, record, first, end - first, block);
  }
  run_experts(executor, kernels, layout, items, tokens, outputs, nullptr);
}

void expert_ffn_group(Executor& executor, Isa isa, const ExpertLayout& layout, const float* x, const void* record,
                      const int32_t* token, const float* weight, float* sums, size_t num_tokens, size_t group_size) {
  const Kernels& kernels = kernels_for(isa, layout.dtype);
  std::vector<size_t> ids;
  std::vector<float> scale;
  for (size_t i = 0; i < group_size; ++i) {
    if (token[i] < 0 || static_cast<size_t>(token[i]) >= num_tokens) continue;  // padding
    ids.push_back(static_cast<size_t>(token[i]));
    scale.push_back(weight[i]);
  }
  if (ids.empty()) return;
  PackedRows packed(kernels, ids.size(), layout.width);
  packed.pack(executor, ids.size(), [&](size_t i) { return x + ids[i] * layout.width; });
  std::vector<const void*> tokens(ids.size());
  std::vector<float*> outputs(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    tokens[i] = packed.row(i);
    outputs[i] = sums + ids[i] * layout.width;
  }
  std::vector<Item> items;
  append_items(items, static_cast<const unsigned char*>(record), 0, ids.size(), tokens_per_block(packed.stride()));
  run_experts(executor, kernels, layout, items, tokens, outputs, scale.data());
}

}  // namespace flashmoe
