// 128-bit vectors in the compiler's own notation, which every processor has; NEON's own where that is better.
#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "mix.h"
#include "rounding.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

namespace flashmoe {
namespace {

struct Vectors {
  typedef float Vector __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  typedef uint16_t Halves __attribute__((vector_size(8)));
  using Tokens = Vector;
  using X = float;
  static constexpr int kLanes = 4;
  static constexpr int kTokens = 3;
  static constexpr int kRows = 4;
  static constexpr bool kMixes = true;

  static FLASHMOE_INLINE Vector broadcast(float x) { return Vector{} + x; }
  static FLASHMOE_INLINE Vector zero() { return Vector{}; }
  static FLASHMOE_INLINE Vector tokens(const float* x, int part) {
    Vector v;
    std::memcpy(&v, x + part * kLanes, sizeof v);
    return v;
  }
  static FLASHMOE_INLINE Vector fma(Vector w, Vector x, Vector acc) {
#if defined(__aarch64__)
    return reinterpret_cast<Vector>(vfmaq_f32(reinterpret_cast<float32x4_t>(acc), reinterpret_cast<float32x4_t>(w),
                                              reinterpret_cast<float32x4_t>(x)));
#else
    return acc + w * x;
#endif
  }
  static FLASHMOE_INLINE float sum(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }
};

struct Bfloat16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 8;
  static constexpr int kParts = 2;

  static FLASHMOE_INLINE Vector weights(const Word* words, int part) {
    Bits pairs;
    std::memcpy(&pairs, words, sizeof pairs);
    return part == 0 ? reinterpret_cast<Vector>(pairs << 16) : reinterpret_cast<Vector>(pairs & 0xffff0000u);
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    pack_even_odd<kLanes>(x, packed, round_to_bfloat16);
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) { return rounded_to_bfloat16<Vectors>(v); }
};

struct Float16 : Vectors {
  using Word = uint16_t;
  static constexpr int kBlock = 4;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) {
    Halves halves;
    std::memcpy(&halves, words, sizeof halves);
#if defined(__aarch64__)
    return reinterpret_cast<Vector>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(halves)));
#else
    // As in float_of_half.
    const Bits half = __builtin_convertvector(halves, Bits);
    const Vector scaled = reinterpret_cast<Vector>((half & 0x7fffu) << 13) * 0x1p112f;
    const Bits special = reinterpret_cast<Bits>((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return reinterpret_cast<Vector>(reinterpret_cast<Bits>(scaled) | special | (half & 0x8000u) << 16);
#endif
  }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) {
    for (int i = 0; i < kBlock; ++i) packed[i] = round_to_half(x[i]);
  }
  static FLASHMOE_INLINE Vector rounded(Vector v) {
    return Vector{round_to_half(v[0]), round_to_half(v[1]), round_to_half(v[2]), round_to_half(v[3])};
  }
};

struct Float32 : Vectors {
  using Word = float;
  static constexpr int kBlock = 4;
  static constexpr int kParts = 1;

  static FLASHMOE_INLINE Vector weights(const Word* words, int) { return tokens(words, 0); }
  static FLASHMOE_INLINE void pack_block(const float* x, float* packed) { std::memcpy(packed, x, kBlock * sizeof *x); }
  static FLASHMOE_INLINE Vector rounded(Vector v) { return v; }
};

constexpr Kernels kKernels[] = {kernels_of<Bfloat16>(), kernels_of<Float16>(), kernels_of<Float32>()};

}  // namespace

const Kernels* portable_kernels(Dtype dtype) { return &kKernels[static_cast<int>(dtype)]; }

}  // namespace flashmoe
