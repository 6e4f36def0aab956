// AVX-512F: 32 registers of 16 lanes.
#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx2,fma,f16c"))), apply_to = function)
#else
// GCC 12 warns of its own headers, whose "undefined" vectors are undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma,f16c")
#endif

#include "mix.h"
#include "rounding.h"

namespace flashmoe {
namespace {

struct Vectors {
  using Vector = __m512;
  using Tokens = __m512;
  using X = float;
  static constexpr int kLanes = 16;
  // 16 accumulators, 4 vectors of tokens, 1 of weights.
  static constexpr int kTokens = 4;
  static constexpr int kRows = 4;
  static constexpr bool kMixes = true;

  static FLASHMOE_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static FLASHMOE_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static FLASHMOE_INLINE Tokens tokens(const float* x, int part) { return _mm512_loadu_ps(x + part * kLanes); }
  static FLASHMOE_INLINE Vector fma(Vector w, Tokens x, Vector acc) { return _mm512_fmadd_ps(w, x, acc); }
  static FLASHMOE_INLINE float sum(Vector v) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

struct Bfloat16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 32;
  static constexpr int kParts = 2;

  static FLASHMOE_INLINE Vector weights(const Word* words, int part) {
    const __m512i pairs = _mm512_loadu_si512(words);
    return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(pairs, 16)
                                         : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    pack_even_odd<kLanes>(x, packed, round_to_bfloat16);
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) { return rounded_to_bfloat16<Vectors>(v); }
};

struct Float16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 16;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm512_storeu_ps(packed, _mm512_cvtph_ps(halves));
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct Float32 : Vectors {
  using Word = float;
  static constexpr int kBlock = 16;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) { return _mm512_loadu_ps(words); }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    _mm512_storeu_ps(packed, _mm512_loadu_ps(x));
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
const Kernels* avx512_kernels(Dtype dtype) { return &kKernels[static_cast<int>(dtype)]; }
}  // namespace flashmoe

#else

namespace flashmoe {
const Kernels* avx512_kernels(Dtype) { return nullptr; }
}  // namespace flashmoe

#endif
