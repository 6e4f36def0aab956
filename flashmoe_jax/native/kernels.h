// Matrix products with stored weights on the CPU, independent of XLA: what `ffi.cc` calls and the fuzz test drives.
//
// Weights are read in place, as the words they are stored in; sums are float32. Invariant: each output is the sum over
// the whole width in one order that is fixed by the instruction set, so its bits depend on its own row of weights and
// its own token alone, not on the other tokens, the number of threads or the way the work was cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace flashmoe {

enum class Dtype : int32_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Levels of instruction sets. kPortable is NEON on 64-bit Arm and what the compiler makes of it elsewhere.
enum class Isa : int32_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Bf16 = 4 };

// Whether this library has the level and this processor runs it.
bool isa_supported(Isa isa);
Isa best_isa();

// Where the matrices of an expert lie in its record, in words from its start.
struct ExpertLayout {
  Dtype dtype;
  size_t width;   // D
  size_t hidden;  // F
  size_t gate_offset, up_offset, down_offset;
};

// out[m][n] = x[m] rounded to the weights' dtype, times row n of weights [num_rows, width].
void matmul(Executor& executor, Isa isa, Dtype dtype, const float* x, const void* weights, float* out,
            size_t num_tokens, size_t num_rows, size_t width);

// Writes down(silu(gate(x)) * up(x)) of every active (token, rank) pair to out [num_tokens, num_ranks, D]; outputs of
// the other pairs stay as they are. Pairs of one expert share a reading of its weights.
void expert_ffn(Executor& executor, Isa isa, const ExpertLayout& layout, const float* x, const void* records,
                size_t record_words, const int32_t* row, const bool* active, float* out, size_t num_tokens,
                size_t num_ranks);

// Adds weight[g] * ffn(x[token[g]]) to sums[token[g]] for the tokens below num_tokens, which are all different.
void expert_ffn_group(Executor& executor, Isa isa, const ExpertLayout& layout, const float* x, const void* record,
                      const int32_t* token, const float* weight, float* sums, size_t num_tokens, size_t group_size);

// Shape of a call of attend: sequences, queries of each, heads, positions of the cache, key heads, width of a head.
struct AttentionShape {
  size_t num_sequences, num_queries, num_heads, capacity, num_key_heads, width;
  size_t window;  // 0 = a query sees all keys up to its own position
};

// Causal attention of q [B, T, N, H], rounded to the cache's dtype, over keys and values [B, S, K, H] in the cache: the
// query at position p sees keys 0 ... p, or the last `window` of them. A position past the cache marks padding, whose
// output is zero. Softmax in float32, its weights rounded to the cache's dtype.
void attend(Executor& executor, Isa isa, Dtype dtype, const AttentionShape& shape, const float* q, const void* keys,
            const void* values, const int32_t* position, float* out);

}  // namespace flashmoe
