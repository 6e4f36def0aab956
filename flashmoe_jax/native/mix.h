// What attention does between its scores and its outputs, over the `Traits` of tile.h: softmax and the weighted sum.
//
// A sum takes its rows one after the other, so its bits do not depend on how many tokens share a row or on where the
// rows were cut; a maximum and a sum over scores run over vectors counted from the first score that a query sees.
// Vectors are used in the compiler's own notation. Included as tile.h is, after it.
#pragma once

#include "tile.h"

namespace flashmoe {
namespace {

// Sums of M tokens over C blocks of words, in registers while the rows pass by.
template <class T, int M, int C>
FLASHMOE_INLINE void mix_blocks(const MixArgs& args, size_t token, size_t k) {
  constexpr int kVectors = C * T::kParts;
  typename T::Vector acc[M][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) std::memcpy(acc[m], args.sums[token + static_cast<size_t>(m)] + k, sizeof acc[m]);
  const auto* row = static_cast<const typename T::Word*>(args.values) + args.begin * args.stride + k;
  const size_t ahead = args.ahead_rows * args.stride * sizeof *row;
  for (size_t s = args.begin; s < args.end; ++s, row += args.stride) {
    if (ahead != 0) {
      // As an integer, for there may be no such row. A prefetch never faults.
      const uintptr_t first = reinterpret_cast<uintptr_t>(row) + ahead;
      for (size_t byte = 0; byte < C * T::kBlock * sizeof *row; byte += kCacheLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(first + byte), 0, 3);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const auto words = T::weights(row + v / T::kParts * T::kBlock, v % T::kParts);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        acc[m][v] = T::fma(words, T::broadcast(args.weight[token + static_cast<size_t>(m)][s]), acc[m][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) std::memcpy(args.sums[token + static_cast<size_t>(m)] + k, acc[m], sizeof acc[m]);
}

// kVectors accumulators of each of M tokens at a time.
template <class T, int M, int kVectors>
FLASHMOE_INLINE void mix_tokens(const MixArgs& args, size_t token) {
  constexpr int kBlocks = kVectors / T::kParts;
  size_t k = 0;
  for (; k + kBlocks * T::kBlock <= args.width; k += kBlocks * T::kBlock) mix_blocks<T, M, kBlocks>(args, token, k);
  for (; k < args.width; k += T::kBlock) mix_blocks<T, M, 1>(args, token, k);
}

template <class T>
void mix(const MixArgs& args) {
  size_t token = 0;
  for (; token + T::kTokens <= args.num_tokens; token += T::kTokens) mix_tokens<T, T::kTokens, 4>(args, token);
  for (; token < args.num_tokens; ++token) mix_tokens<T, 1, 8>(args, token);
}

template <class T>
void unpack(const float* sums, size_t width, float* out) {
  for (size_t k = 0; k < width; ++k) {
    // Words of two parts are the even and the odd ones of a block.
    const size_t block = k / T::kBlock * T::kBlock, i = k - block;
    out[k] = sums[block + i % T::kParts * T::kLanes + i / T::kParts];
  }
}

template <class T>
FLASHMOE_INLINE typename T::Vector load_vector(const float* x) {
  typename T::Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

// e^x for x <= 0, within 2 units in the last place down to -86 and 0 below: x = n log 2 + r, a polynomial in r
// (Cephes' expf), and n added to the exponent. NaN stays NaN.
template <class T>
FLASHMOE_INLINE typename T::Vector exponential(typename T::Vector x) {
  using Vector = typename T::Vector;
  typedef uint32_t Bits __attribute__((vector_size(sizeof(Vector))));
  const Vector least = T::broadcast(-86.0f);
  const Vector bounded = x < least ? least : x;
  // Added to 1.5 * 2^23, a number is rounded to a whole one, which its low bits then hold.
  const Vector shifted = bounded * 1.44269504f + 12582912.0f;
  const Vector n = shifted - 12582912.0f;
  const Vector r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vector power = reinterpret_cast<Vector>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23));
  const Vector result = x < least ? T::zero() : power;
  return x != x ? x : result;
}

// To nearest, ties to even; NaN stays NaN.
template <class T>
FLASHMOE_INLINE typename T::Vector rounded_to_bfloat16(typename T::Vector x) {
  using Vector = typename T::Vector;
  typedef uint32_t Bits __attribute__((vector_size(sizeof(Vector))));
  const Bits bits = reinterpret_cast<Bits>(x);
  const Vector nearest = reinterpret_cast<Vector>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  return x != x ? x : nearest;
}

template <class T>
void softmax(float* scores, size_t count, float scale) {
  using Vector = typename T::Vector;
  // Scores that fill up the last vector get weight 0.
  for (size_t i = 0; i < T::kLanes; ++i) scores[count + i] = -__builtin_inff();
  Vector most = T::broadcast(-__builtin_inff());
  for (size_t i = 0; i < count; i += T::kLanes) {
    const Vector score = load_vector<T>(scores + i) * scale;
    std::memcpy(scores + i, &score, sizeof score);
    most = most < score ? score : most;
  }
  float largest = most[0];
  for (int i = 1; i < T::kLanes; ++i) largest = largest < most[i] ? most[i] : largest;
  Vector sum = T::zero();
  for (size_t i = 0; i < count; i += T::kLanes) {
    const Vector power = exponential<T>(load_vector<T>(scores + i) - largest);
    std::memcpy(scores + i, &power, sizeof power);
    sum += power;
  }
  const float total = T::sum(sum);
  for (size_t i = 0; i < count; i += T::kLanes) {
    const Vector weight = T::rounded(load_vector<T>(scores + i) / total);
    std::memcpy(scores + i, &weight, sizeof weight);
  }
}

template <class T>
constexpr Kernels kernels_of() {
  static_assert(T::kRows % 2 == 0 && kCacheLine / sizeof(typename T::Word) % T::kBlock == 0, "whole blocks per line");
  if constexpr (T::kMixes) {
    static_assert(T::kTokens <= kMaxMixTokens && T::kLanes <= kMaxLanes, "attention reserves room for that many");
    return Kernels{packed_bytes<T>, pack<T>, products<T>, gate_up<T>, T::kTokens, mix<T>, unpack<T>, softmax<T>};
  } else {
    return Kernels{packed_bytes<T>, pack<T>, products<T>, gate_up<T>, 0, nullptr, nullptr, nullptr};
  }
}

}  // namespace
}  // namespace flashmoe
