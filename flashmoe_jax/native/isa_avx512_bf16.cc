// AVX-512 BF16: products of pairs of bfloat16 numbers. The instruction treats denormals as zeros.
#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<avx512bf16intrin.h>)
#define FLASHMOE_HAS_AVX512_BF16
#endif
#endif

#if defined(FLASHMOE_HAS_AVX512_BF16)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bf16,avx2,fma"))), apply_to = function)
#else
// GCC 12 warns of its own headers, whose "undefined" vectors are undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bf16,avx2,fma")
#endif

#include "mix.h"
#include "rounding.h"

namespace flashmoe {
namespace {

struct Bfloat16 {
  using Word = uint16_t;
  using X = uint16_t;
  using Vector = __m512;
  using Tokens = __m512bh;
  static constexpr int kBlock = 32;
  static constexpr int kParts = 1;
  static constexpr int kTokens = 4;
  static constexpr int kRows = 4;
  static constexpr bool kMixes = false;  // its products take pairs of words

  static FLASHMOE_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static FLASHMOE_INLINE __m512bh load(const uint16_t* words) {
    __m512bh v;
    std::memcpy(&v, words, sizeof v);
    return v;
  }
  static FLASHMOE_INLINE Tokens tokens(const X* x, int) { return load(x); }
  static FLASHMOE_INLINE __m512bh weights(const Word* words, int) { return load(words); }
  static FLASHMOE_INLINE Vector fma(__m512bh w, Tokens x, Vector acc) { return _mm512_dpbf16_ps(acc, w, x); }
  static FLASHMOE_INLINE float sum(Vector v) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static FLASHMOE_INLINE void pack_block(const float* x, X* packed) {
    for (int i = 0; i < kBlock; ++i) packed[i] = static_cast<uint16_t>(bfloat16_bits(x[i]));
  }
};

constexpr Kernels kKernels = kernels_of<Bfloat16>();

}  // namespace
}  // namespace flashmoe

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace flashmoe {
const Kernels* avx512_bf16_kernels() { return &kKernels; }
}  // namespace flashmoe

#else

namespace flashmoe {
const Kernels* avx512_bf16_kernels() { return nullptr; }
}  // namespace flashmoe

#endif
