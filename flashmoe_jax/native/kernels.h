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

}  // namespace flashmoe
