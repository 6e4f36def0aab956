// What each instruction set provides for each dtype: a table of functions, filled by the isa_*.cc files.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace flashmoe {

// Products of the rows [begin, end) of a matrix with some tokens.
struct ProductArgs {
  const void* weights;         // [rows, width], stored words
  size_t width;                // words of a row
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

struct Kernels {
  size_t (*packed_bytes)(size_t width);
  // Rounds a token to the weights' dtype and lays it out as the products read it, zeros up to a whole block.
  void (*pack)(const float* x, size_t width, void* packed);
  void (*products)(const ProductArgs& args);
  void (*gate_up)(const GateUpArgs& args);
};

// Null where the compiler or the processor's family has no such level.
const Kernels* portable_kernels(Dtype dtype);
const Kernels* avx2_kernels(Dtype dtype);
const Kernels* avx512_kernels(Dtype dtype);
const Kernels* avx512_bf16_kernels();

// silu(gate) * up.
float gated(float gate, float up);

}  // namespace flashmoe
