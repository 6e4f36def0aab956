// What each instruction set provides for each dtype: a table of functions, filled by the isa_*.cc files.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace flashmoe {

// Products of the rows [begin, end) of a matrix with some tokens.
struct ProductArgs {
  const void* weights;         // rows of stored words
  size_t width;                // words of a row
  size_t stride;               // words from the start of a row to the start of the next
  size_t ahead_bytes;          // how far ahead of each row to prefetch; 0 = rows are in the cache
  size_t begin, end;           // rows
  const void* const* x;        // packed token of each
  size_t num_tokens;
  float* const* out;           // row of outputs of each token
  const float* scale;          // null: out = product; else out += scale[token] * product
};

// silu(gate . x) * (up . x) of the hidden units [begin, end).
struct GateUpArgs {
  const void* gate;
  const void* up;
  size_t width;
  size_t begin, end;
  const void* const* x;
  size_t num_tokens;
  float* const* out;
};

// Adds weighted rows of values to sums: sums[t] += weight[t][row] * row, one row of [begin, end) after the other. Sums
// lie in the order of the vectors that the words are read as, so they may be continued by another call.
struct MixArgs {
  const void* values;  // rows of stored words
  size_t width;        // words of a row, whole blocks
  size_t stride;
  size_t begin, end;
  size_t ahead_rows;  // how far ahead to prefetch; 0 = rows are in the cache
  const float* const* weight;
  size_t num_tokens;  // up to mix_tokens
  float* const* sums;
};

struct Kernels {
  size_t (*packed_bytes)(size_t width);
  // Rounds a token to the weights' dtype and lays it out as the products read it, zeros up to a whole block.
  void (*pack)(const float* x, size_t width, void* packed);
  void (*products)(const ProductArgs& args);
  void (*gate_up)(const GateUpArgs& args);
  // Of attention; null where another level's are used.
  size_t mix_tokens;  // tokens that a row of values is read for at once
  void (*mix)(const MixArgs& args);
  // The first `width` sums in the order of the words.
  void (*unpack)(const float* sums, size_t width, float* out);
  // Turns scores into weights rounded to the dtype: softmax(scale * score). kMaxLanes scores more are overwritten.
  void (*softmax)(float* scores, size_t count, float scale);
};

constexpr size_t kMaxLanes = 16;
constexpr size_t kMaxMixTokens = 4;
// How far ahead of each stream of weights that comes from memory.
constexpr size_t kAheadBytes = 1024;

// The kernels of a level, or of the best one that this processor runs.
const Kernels& kernels_for(Isa isa, Dtype dtype);

// Null where the compiler or the processor's family has no such level.
const Kernels* portable_kernels(Dtype dtype);
const Kernels* avx2_kernels(Dtype dtype);
const Kernels* avx512_kernels(Dtype dtype);
const Kernels* avx512_bf16_kernels();

// silu(gate) * up.
float gated(float gate, float up);

}  // namespace flashmoe
