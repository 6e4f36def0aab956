// AVX2 with FMA and F16C: 16 registers of 8 lanes.
#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "mix.h"
#include "rounding.h"

namespace flashmoe {
namespace {

struct Vectors {
  using Vector = __m256;
  using Tokens = __m256;
  using X = float;
  static constexpr int kLanes = 8;
  // 12 accumulators, 3 vectors of tokens, 1 of weights.
  static constexpr int kTokens = 3;
  static constexpr int kRows = 4;
  static constexpr bool kMixes = true;

  static FLASHMOE_INLINE Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static FLASHMOE_INLINE Vector zero() { return _mm256_setzero_ps(); }
  static FLASHMOE_INLINE Tokens tokens(const float* x, int part) { return _mm256_loadu_ps(x + part * kLanes); }
  static FLASHMOE_INLINE Vector fma(Vector w, Tokens x, Vector acc) { return _mm256_fmadd_ps(w, x, acc); }
  static FLASHMOE_INLINE float sum(Vector v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

struct Bfloat16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 16;
  static constexpr int kParts = 2;

  static FLASHMOE_INLINE Vector weights(const Word* words, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(pairs, 16)
                                         : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    pack_even_odd<kLanes>(x, packed, round_to_bfloat16);
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) { return rounded_to_bfloat16<Vectors>(v); }
};

struct Float16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 8;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_ps(packed, _mm256_cvtph_ps(halves));
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct Float32 : Vectors {
  using Word = float;
  static constexpr int kBlock = 8;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) { return _mm256_loadu_ps(words); }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    _mm256_storeu_ps(packed, _mm256_loadu_ps(x));
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) { return v; }
};

constexpr Kernels kKernels[] = {kernels_of<Bfloat16>(), kernels_of<Float16>(), kernels_of<Float32>()};

}  // namespace
}  // namespace flashmoe

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace flashmoe {
const Kernels* avx2_kernels(Dtype dtype) { return &kKernels[static_cast<int>(dtype)]; }
}  // namespace flashmoe

#else

namespace flashmoe {
const Kernels* avx2_kernels(Dtype) { return nullptr; }
}  // namespace flashmoe

#endif
