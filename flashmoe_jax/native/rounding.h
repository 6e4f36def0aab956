// Scalar conversions between float32 and the 16-bit formats, rounding to nearest, ties to even. NaN stays NaN.
// Internal linkage: each isa_*.cc compiles its own copy for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace flashmoe {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bfloat16_bits(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
}

inline float round_to_bfloat16(float x) { return float_of(bfloat16_bits(x) << 16); }

inline float float_of_half(uint32_t half) {
  // The exponent's bias is put right by a product, which is exact for denormals too.
  const uint32_t magnitude = bits_of(float_of((half & 0x7fffu) << 13) * 0x1p112f);
  const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of(magnitude | special | (half & 0x8000u) << 16);
}

inline uint32_t half_bits(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t bits = bits_of(x) & 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u);
  // Below the normal numbers: adding 0.5 rounds at the weight of the last denormal bit.
  if (bits < 0x38800000u) return sign | (bits_of(float_of(bits) + 0.5f) - 0x3f000000u);
  return sign | ((bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

inline float round_to_half(float x) { return float_of_half(half_bits(x)); }

}  // namespace
}  // namespace flashmoe
