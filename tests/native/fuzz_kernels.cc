// Drives the kernels with random shapes, without JAX: run under the sanitizers by test_sanitizers.py.
//
// Every buffer is its own heap block of exactly the bytes that the kernel may touch. Checked are float64 results, that
// bits depend neither on the batch, the other pairs, unseen keys nor the number of threads, and that nothing else is
// written.
// Usage: fuzz_kernels SEED NUM_ROUNDS
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "rounding.h"

extern "C" uint64_t flashmoe_sum_streams(const char* base, size_t size, int streams);

namespace {

using flashmoe::Dtype;
using flashmoe::ExpertLayout;
using flashmoe::Isa;

constexpr float kUntouched = 12345.0f;

// Threads that live as long as the pool's use, one for each task.
class Threads : public flashmoe::Executor {
 public:
  explicit Threads(size_t num_threads) : num_threads_(num_threads) {}
  ~Threads() override { join(); }
  size_t num_threads() const override { return num_threads_; }
  void schedule(std::function<void()> task) override { threads_.emplace_back(std::move(task)); }
  void join() {
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  size_t num_threads_;
  std::vector<std::thread> threads_;
};

// Runs tasks long after the loop that they were meant for.
class Late : public flashmoe::Executor {
 public:
  ~Late() override {
    for (auto& task : tasks_) task();
  }
  size_t num_threads() const override { return 4; }
  void schedule(std::function<void()> task) override { tasks_.push_back(std::move(task)); }

 private:
  std::vector<std::function<void()>> tasks_;
};

std::mt19937 random_source;

size_t uniform(size_t low, size_t high) { return std::uniform_int_distribution<size_t>(low, high)(random_source); }

float normal() { return std::normal_distribution<float>()(random_source); }

[[noreturn]] void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "failed: %s %s\n", what, detail);
  std::exit(1);
}

// Stored words of one dtype and the numbers they stand for.
struct Words {
  Dtype dtype;
  size_t size;
  std::unique_ptr<unsigned char[]> bytes;
  std::vector<double> values;

  Words(Dtype dtype_, size_t size_) : dtype(dtype_), size(size_), bytes(new unsigned char[size_ * word_bytes()]), values(size_) {
    for (size_t i = 0; i < size; ++i) set(i, normal());
  }
  size_t word_bytes() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
  void set(size_t i, float value) {
    const uint32_t bits = dtype == Dtype::kFloat32 ? flashmoe::bits_of(value)
                          : dtype == Dtype::kFloat16 ? flashmoe::half_bits(value)
                                                     : flashmoe::bfloat16_bits(value);
    std::memcpy(bytes.get() + i * word_bytes(), &bits, word_bytes());
    values[i] = rounded(dtype, value);
  }
  static double rounded(Dtype dtype, float value) {
    return dtype == Dtype::kFloat32 ? value
           : dtype == Dtype::kFloat16 ? flashmoe::round_to_half(value)
                                      : flashmoe::round_to_bfloat16(value);
  }
};

// An exact heap block of floats.
struct Floats {
  size_t size;
  std::unique_ptr<float[]> data;
  explicit Floats(size_t size_) : size(size_), data(new float[size_]) {}
  static Floats normals(size_t size) {
    Floats f(size);
    for (size_t i = 0; i < size; ++i) f.data[i] = normal();
    return f;
  }
  static Floats filled(size_t size, float value) {
    Floats f(size);
    for (size_t i = 0; i < size; ++i) f.data[i] = value;
    return f;
  }
  bool same_bits(const Floats& other) const { return std::memcmp(data.get(), other.data.get(), size * 4) == 0; }
};

void check_close(double got, double expected, double scale, const char* what) {
  if (std::abs(got - expected) <= 2e-5 * scale + 1e-6) return;
  char detail[96];
  std::snprintf(detail, sizeof detail, "got %.9g, expected %.9g", got, expected);
  fail(what, detail);
}

void fuzz_matmul(Isa isa, Dtype dtype) {
  const size_t M = uniform(0, 20), N = uniform(1, 40), K = uniform(1, 200);
  const Words weights(dtype, N * K);
  const Floats x = Floats::normals(M * K);
  Threads one(1), many(uniform(2, 7));
  Floats out = Floats::filled(M * N, kUntouched), again = Floats::filled(M * N, kUntouched);
  flashmoe::matmul(one, isa, dtype, x.data.get(), weights.bytes.get(), out.data.get(), M, N, K);
  flashmoe::matmul(many, isa, dtype, x.data.get(), weights.bytes.get(), again.data.get(), M, N, K);
  many.join();
  if (!out.same_bits(again)) fail("matmul: bits depend on the number of threads");
  for (size_t m = 0; m < M; ++m) {
    Floats row(N);
    flashmoe::matmul(one, isa, dtype, x.data.get() + m * K, weights.bytes.get(), row.data.get(), 1, N, K);
    if (std::memcmp(row.data.get(), out.data.get() + m * N, N * 4) != 0) fail("matmul: bits depend on the batch");
    for (size_t n = 0; n < N; ++n) {
      double sum = 0, scale = 0;
      for (size_t k = 0; k < K; ++k) {
        const double term = weights.values[n * K + k] * Words::rounded(dtype, x.data[m * K + k]);
        sum += term;
        scale += std::abs(term);
      }
      check_close(out.data[m * N + n], sum, scale, "matmul");
    }
  }
}

// A store of records; gaps between the matrices hold NaN, which must reach no result.
struct Records {
  ExpertLayout layout;
  size_t num_rows, record_words;
  Words words;

  static ExpertLayout random_layout(Dtype dtype) {
    ExpertLayout layout{dtype, uniform(1, 90), uniform(1, 50), 0, 0, 0};
    const size_t matrix = layout.width * layout.hidden;
    layout.up_offset = uniform(0, 3);
    layout.gate_offset = layout.up_offset + matrix + uniform(0, 3);
    layout.down_offset = layout.gate_offset + matrix + uniform(0, 3);
    return layout;
  }
  explicit Records(Dtype dtype) : Records(random_layout(dtype), uniform(1, 5)) {}
  Records(const ExpertLayout& layout_, size_t num_rows_)
      : layout(layout_), num_rows(num_rows_), record_words(layout.down_offset + layout.width * layout.hidden),
        words(layout.dtype, num_rows * record_words) {
    for (size_t r = 0; r < num_rows; ++r) {
      for (size_t i = 0; i < record_words; ++i) {
        if (!in_matrix(i, layout.up_offset) && !in_matrix(i, layout.gate_offset) && !in_matrix(i, layout.down_offset)) {
          words.set(r * record_words + i, std::nanf(""));
        }
      }
    }
  }
  bool in_matrix(size_t i, size_t offset) const { return i >= offset && i < offset + layout.width * layout.hidden; }
  const unsigned char* record(size_t row) const { return words.bytes.get() + row * record_words * words.word_bytes(); }

  // float64 feed-forward of one token; `scale` bounds the rounding of the hidden units too.
  std::vector<double> feed_forward(size_t row, const float* x, double* scale) const {
    const size_t D = layout.width, F = layout.hidden;
    const double* w = words.values.data() + row * record_words;
    std::vector<double> hidden(F), out(D);
    for (size_t f = 0; f < F; ++f) {
      double gate = 0, up = 0;
      for (size_t d = 0; d < D; ++d) {
        const double rounded = Words::rounded(layout.dtype, x[d]);
        gate += w[layout.gate_offset + f * D + d] * rounded;
        up += w[layout.up_offset + f * D + d] * rounded;
      }
      hidden[f] = gate / (1 + std::exp(-gate)) * up;
    }
    *scale = 1;
    for (size_t d = 0; d < D; ++d) {
      double sum = 0;
      for (size_t f = 0; f < F; ++f) {
        const double term = w[layout.down_offset + d * F + f] * hidden[f];
        sum += term;
        *scale = std::max(*scale, std::abs(term) * static_cast<double>(F));
      }
      out[d] = sum;
    }
    // Hidden units are rounded to the dtype once more: half a unit in the last place of its mantissa.
    const double unit = layout.dtype == Dtype::kBfloat16 ? 0x1p-8 : layout.dtype == Dtype::kFloat16 ? 0x1p-11 : 0x1p-22;
    *scale *= unit / 2e-5 + 1;
    return out;
  }
};

void fuzz_experts(Isa isa, Dtype dtype) {
  const Records records(dtype);
  const size_t D = records.layout.width, T = uniform(0, 9), X = uniform(1, 4);
  const Floats x = Floats::normals(T * D);
  std::unique_ptr<int32_t[]> row(new int32_t[T * X]);
  std::unique_ptr<bool[]> active(new bool[T * X]);
  for (size_t i = 0; i < T * X; ++i) {
    active[i] = uniform(0, 3) != 0;
    row[i] = active[i] ? static_cast<int32_t>(uniform(0, records.num_rows - 1)) : 1 << 30;
  }
  const auto run = [&](flashmoe::Executor& executor, Floats& out) {
    flashmoe::expert_ffn(executor, isa, records.layout, x.data.get(), records.words.bytes.get(), records.record_words,
                         row.get(), active.get(), out.data.get(), T, X);
  };
  Floats out = Floats::filled(T * X * D, kUntouched), again = Floats::filled(T * X * D, kUntouched);
  Threads one(1);
  run(one, out);
  {
    Late late;
    run(late, again);
  }
  if (!out.same_bits(again)) fail("expert_ffn: bits depend on the number of threads");
  for (size_t i = 0; i < T * X; ++i) {
    const float* got = out.data.get() + i * D;
    if (!active[i]) {
      for (size_t d = 0; d < D; ++d) {
        if (got[d] != kUntouched) fail("expert_ffn: wrote to a pair that is not active");
      }
      continue;
    }
    Floats alone(D);
    const bool yes = true;
    const float* token = x.data.get() + i / X * D;
    flashmoe::expert_ffn(one, isa, records.layout, token, records.words.bytes.get(), records.record_words, &row[i], &yes,
                         alone.data.get(), 1, 1);
    if (std::memcmp(alone.data.get(), got, D * 4) != 0) fail("expert_ffn: bits depend on the other pairs");
    double scale = 0;
    const auto expected = records.feed_forward(static_cast<size_t>(row[i]), token, &scale);
    for (size_t d = 0; d < D; ++d) check_close(got[d], expected[d], scale, "expert_ffn");
  }
}

void fuzz_group(Isa isa, Dtype dtype) {
  const Records records(dtype);
  const size_t D = records.layout.width, T = uniform(1, 70), G = uniform(0, T + 4), row = uniform(0, records.num_rows - 1);
  const Floats x = Floats::normals(T * D), weight = Floats::normals(G);
  std::vector<int32_t> order(T + 4);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);  // those from T are padding
  std::shuffle(order.begin(), order.end(), random_source);
  std::unique_ptr<int32_t[]> token(new int32_t[G]);
  std::copy(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(G), token.get());
  Floats sums = Floats::normals(T * D);
  Floats before(T * D), again(T * D);
  std::memcpy(before.data.get(), sums.data.get(), T * D * 4);
  std::memcpy(again.data.get(), sums.data.get(), T * D * 4);
  const auto run = [&](flashmoe::Executor& executor, Floats& y) {
    flashmoe::expert_ffn_group(executor, isa, records.layout, x.data.get(), records.record(row), token.get(),
                               weight.data.get(), y.data.get(), T, G);
  };
  Threads one(1), many(3);
  run(one, sums);
  run(many, again);
  many.join();
  if (!sums.same_bits(again)) fail("expert_ffn_group: bits depend on the number of threads");
  std::vector<bool> named(T);
  for (size_t g = 0; g < G; ++g) {
    const auto t = static_cast<size_t>(token[g]);
    if (t >= T) continue;
    named[t] = true;
    Floats alone(D);
    const bool yes = true;
    const auto id = static_cast<int32_t>(row);
    flashmoe::expert_ffn(one, isa, records.layout, x.data.get() + t * D, records.words.bytes.get(), records.record_words,
                         &id, &yes, alone.data.get(), 1, 1);
    for (size_t d = 0; d < D; ++d) {
      const float product = weight.data[g] * alone.data[d];  // rounded, then added: not one fused operation
      if (sums.data[t * D + d] != before.data[t * D + d] + product) fail("expert_ffn_group: not what one pair gives");
    }
  }
  for (size_t t = 0; t < T; ++t) {
    if (!named[t] && std::memcmp(&sums.data[t * D], &before.data[t * D], D * 4) != 0) {
      fail("expert_ffn_group: wrote to a token outside the group");
    }
  }
}

// Attention: a cache, queries and their positions.
struct Attention {
  flashmoe::AttentionShape shape;
  Words keys, values;
  Floats q;
  std::vector<int32_t> position;

  static flashmoe::AttentionShape random_shape() {
    const size_t key_heads = uniform(1, 3), group = uniform(1, 6), capacity = uniform(1, 150);
    const size_t queries = uniform(0, 5) == 0 ? uniform(20, 80) : uniform(0, 5);
    const size_t window = uniform(0, 1) == 0 ? 0 : uniform(1, capacity + 5);
    return {uniform(1, 2), queries, key_heads * group, capacity, key_heads, uniform(1, 90), window};
  }
  explicit Attention(Dtype dtype) : Attention(dtype, random_shape()) {}
  Attention(Dtype dtype, const flashmoe::AttentionShape& shape_)
      : shape(shape_), keys(dtype, cache_size()), values(dtype, cache_size()),
        q(Floats::normals(num_queries() * shape.num_heads * shape.width)), position(num_queries()) {
    // Those at or past the capacity are padding.
    for (auto& at : position) at = static_cast<int32_t>(uniform(0, shape.capacity + shape.capacity / 8));
  }
  size_t num_queries() const { return shape.num_sequences * shape.num_queries; }
  size_t cache_size() const { return shape.num_sequences * shape.capacity * shape.num_key_heads * shape.width; }
  size_t query_size() const { return shape.num_heads * shape.width; }
  bool is_padding(size_t query) const { return static_cast<size_t>(position[query]) >= shape.capacity; }
  size_t first_key(size_t query) const {
    const auto end = static_cast<size_t>(position[query]) + 1;
    return shape.window != 0 && end > shape.window ? end - shape.window : 0;
  }

  void run(flashmoe::Executor& executor, Isa isa, Floats& out) const {
    flashmoe::attend(executor, isa, keys.dtype, shape, q.data.get(), keys.bytes.get(), values.bytes.get(),
                     position.data(), out.data.get());
  }

  // One query of one sequence, with NaN wherever it must not look.
  Attention alone(size_t query) const {
    auto one = shape;
    one.num_sequences = one.num_queries = 1;
    Attention result(keys.dtype, one);
    const size_t row = shape.num_key_heads * shape.width, sequence = query / shape.num_queries;
    for (size_t s = 0; s < shape.capacity; ++s) {
      const bool is_seen = !is_padding(query) && s >= first_key(query) && s <= static_cast<size_t>(position[query]);
      for (size_t i = 0; i < row; ++i) {
        const size_t from = (sequence * shape.capacity + s) * row + i;
        result.keys.set(s * row + i, is_seen ? static_cast<float>(keys.values[from]) : std::nanf(""));
        result.values.set(s * row + i, is_seen ? static_cast<float>(values.values[from]) : std::nanf(""));
      }
    }
    std::memcpy(result.q.data.get(), q.data.get() + query * query_size(), query_size() * 4);
    result.position[0] = position[query];
    return result;
  }

  // float64 output of one head of one query.
  std::vector<double> exact(size_t query, size_t head) const {
    const size_t H = shape.width, key_head = head / (shape.num_heads / shape.num_key_heads);
    std::vector<double> out(H);
    if (is_padding(query)) return out;
    const size_t first = first_key(query), last = static_cast<size_t>(position[query]);
    std::vector<double> score(last + 1);
    double largest = -INFINITY, sum = 0;
    const auto at = [&](size_t s) {
      return ((query / shape.num_queries * shape.capacity + s) * shape.num_key_heads + key_head) * H;
    };
    for (size_t s = first; s <= last; ++s) {
      for (size_t h = 0; h < H; ++h) {
        score[s] += keys.values[at(s) + h] * Words::rounded(keys.dtype, q.data[query * query_size() + head * H + h]);
      }
      score[s] /= std::sqrt(static_cast<double>(H));
      largest = std::max(largest, score[s]);
    }
    for (size_t s = first; s <= last; ++s) sum += std::exp(score[s] - largest);
    for (size_t s = first; s <= last; ++s) {
      for (size_t h = 0; h < H; ++h) out[h] += std::exp(score[s] - largest) / sum * values.values[at(s) + h];
    }
    return out;
  }
};

void fuzz_attend(Isa isa, Dtype dtype) {
  const Attention attention(dtype);
  const size_t size = attention.query_size();
  Floats out = Floats::filled(attention.q.size, kUntouched), again = Floats::filled(attention.q.size, kUntouched);
  Threads one(1), many(uniform(2, 7));
  attention.run(one, isa, out);
  attention.run(many, isa, again);
  many.join();
  if (!out.same_bits(again)) fail("attend: bits depend on the number of threads");
  // Weights, which add up to 1, are rounded to the dtype: half a unit in the last place of each.
  const double unit = dtype == Dtype::kBfloat16 ? 0x1p-8 : dtype == Dtype::kFloat16 ? 0x1p-11 : 0x1p-22;
  double scale = 1;
  for (const double value : attention.values.values) scale = std::max(scale, std::abs(value));
  scale *= unit / 2e-5 + 1;
  for (size_t query = 0; query < attention.num_queries(); ++query) {
    const float* got = out.data.get() + query * size;
    for (size_t head = 0; head < attention.shape.num_heads; ++head) {
      const auto expected = attention.exact(query, head);
      for (size_t h = 0; h < expected.size(); ++h) {
        check_close(got[head * expected.size() + h], expected[h], scale, "attend");
      }
    }
    if (query % 8 != 0) continue;
    Floats alone(size);
    attention.alone(query).run(one, isa, alone);
    if (std::memcmp(alone.data.get(), got, size * 4) != 0) fail("attend: bits depend on what a query does not see");
  }
}

// Keys further from the largest score than the exponential reaches, and scores that are no numbers.
void attend_special_values(Isa isa, Dtype dtype) {
  Attention attention(dtype, {1, 1, 1, 40, 1, 1, 0});
  attention.q.data[0] = 1.0f;
  attention.position[0] = 39;
  for (size_t s = 0; s < 40; ++s) attention.keys.set(s, s == 17 ? 0.0f : -80.0f - 8.0f * static_cast<float>(s));
  for (size_t s = 0; s < 40; ++s) attention.values.set(s, s == 17 ? 0.5f : 1.0f);
  Threads one(1);
  Floats out(1);
  attention.run(one, isa, out);
  if (out.data[0] != 0.5f) fail("attend: scores far from the largest");
  for (const float special : {std::nanf(""), INFINITY}) {
    attention.keys.set(39, special);
    attention.run(one, isa, out);
    if (!std::isnan(out.data[0])) fail("attend: a score that is no number is lost");
  }
}

void special_values(Isa isa, Dtype dtype) {
  for (const size_t K : {size_t{7}, size_t{32}, size_t{70}}) {
    Words weights(dtype, 5 * K);
    Floats x = Floats::filled(2 * K, 1.0f);
    weights.set(0, std::nanf(""));
    weights.set(1 * K + K - 1, INFINITY);
    weights.set(2 * K + 2, -INFINITY);
    x.data[K] = INFINITY;  // of the second token
    Floats out(2 * 5);
    Threads one(1);
    flashmoe::matmul(one, isa, dtype, x.data.get(), weights.bytes.get(), out.data.get(), 2, 5, K);
    const float* y = out.data.get();
    if (!std::isnan(y[0]) || y[1] != INFINITY || y[2] != -INFINITY || !std::isfinite(y[3]) || !std::isfinite(y[4]) ||
        !std::isinf(y[5 + 3])) {
      fail("NaN or infinity does not propagate");
    }
  }
  if (dtype == Dtype::kFloat16) {  // denormal halves are ordinary numbers
    Words weights(dtype, 32);
    Floats x = Floats::filled(32, 1.0f);
    for (size_t i = 0; i < 32; ++i) weights.set(i, 0x1p-24f);
    float y = 0;
    Threads one(1);
    flashmoe::matmul(one, isa, dtype, x.data.get(), weights.bytes.get(), &y, 1, 1, 32);
    if (y != 0x1p-19f) fail("denormal halves are lost");
  }
}

// Scalar roundings against the definition: nearest, ties to even, for all halves and the points between them.
void check_rounding() {
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const float value = flashmoe::float_of_half(half);
    const float next = half == 0x7bff ? 65536.0f : flashmoe::float_of_half(half + 1);
    const float middle = (value + next) / 2;
    if (flashmoe::half_bits(value) != half || flashmoe::half_bits(middle) != half + (half & 1) ||
        flashmoe::half_bits(std::nextafter(middle, 0.0f)) != half ||
        flashmoe::half_bits(-std::nextafter(middle, INFINITY)) != (0x8000u | (half + 1))) {
      fail("rounding to float16");
    }
  }
  if (flashmoe::bfloat16_bits(0x1.01p0f) != 0x3f80u || flashmoe::bfloat16_bits(0x1.03p0f) != 0x3f82u ||
      flashmoe::bfloat16_bits(3.4e38f) != 0x7f80u || !std::isnan(flashmoe::round_to_bfloat16(std::nanf("")))) {
    fail("rounding to bfloat16");
  }
}

// Words that are all 1: their sum says how many were read.
void fuzz_streams() {
  for (const size_t streams : {1, 2, 4}) {
    const std::vector<uint64_t> words(uniform(0, 300), 1);
    const uint64_t read = words.size() / streams / 8 * 8 * streams;
    const auto* base = reinterpret_cast<const char*>(words.data());
    if (flashmoe_sum_streams(base, 8 * words.size(), static_cast<int>(streams)) != read) fail("sum_streams");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s SEED NUM_ROUNDS\n", argv[0]);
    return 2;
  }
  random_source.seed(static_cast<unsigned>(std::atoi(argv[1])));
  check_rounding();
  for (int round = 0; round < std::atoi(argv[2]); ++round) fuzz_streams();
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (!flashmoe::isa_supported(isa)) continue;
    for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16, Dtype::kFloat32}) {
      special_values(isa, dtype);
      attend_special_values(isa, dtype);
      for (int round = 0; round < std::atoi(argv[2]); ++round) {
        fuzz_matmul(isa, dtype);
        fuzz_experts(isa, dtype);
        fuzz_group(isa, dtype);
        fuzz_attend(isa, dtype);
      }
    }
    std::printf("level %d\n", static_cast<int>(isa));
  }
  return 0;
}
