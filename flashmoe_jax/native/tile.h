// The loops that all instruction sets share, over a `Traits` class that names the vectors of one set and dtype.
//
// A tile is kTokens tokens times kRows rows of weights with one vector accumulator each, which runs over the whole
// width and is added up at the end. A smaller tile does the same with fewer accumulators: shape never changes bits.
// A row's last, partial block is copied to a block of zeros first, so nothing is read past a row, which may be the
// last of a mapped record. Included inside the compiler's target region of each isa_*.cc: internal linkage only, and
// nothing of the standard library is instantiated here, lest a general function is compiled for a special processor.
//
// Traits: Word (stored), X (packed token), Vector (accumulator), kLanes, kBlock (words per step), kParts (vectors per
// block), kTokens, kRows (even), kMixes (has the kernels of mix.h); zero(), weights(word*, part), tokens(x*, part),
// fma(w, x, acc), sum(acc), pack(...). With kMixes words become float32 vectors of kLanes, and there are broadcast(x)
// and rounded(v), to the dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "isa.h"

namespace flashmoe {
namespace {

constexpr size_t kCacheLine = 64;

#define FLASHMOE_INLINE inline __attribute__((always_inline))

template <class T, int M, int N>
FLASHMOE_INLINE void accumulate(typename T::Vector (&acc)[M][N], const typename T::Word* const (&rows)[N],
                                const typename T::X* (&x)[M], size_t w_at, size_t x_at) {
#pragma GCC unroll 8
  for (int part = 0; part < T::kParts; ++part) {
    typename T::Tokens x_part[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) x_part[m] = T::tokens(x[m] + x_at, part);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const auto w = T::weights(rows[n] + w_at, part);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][n] = T::fma(w, x_part[m], acc[m][n]);
    }
  }
}

// Sums of M tokens times N rows. Where the rows come from memory, each is prefetched, and on into the row behind it.
template <class T, int M, int N>
__attribute__((noinline)) void tile(const typename T::Word* const (&rows)[N], const void* const* tokens, size_t width,
                                    size_t ahead_bytes, float (&out)[M][N]) {
  using Word = typename T::Word;
  const typename T::X* x[M];
  typename T::Vector acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    x[m] = static_cast<const typename T::X*>(tokens[m]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = T::zero();
  }
  constexpr size_t kLineWords = kCacheLine / sizeof(Word);
  size_t k = 0;
  for (; k + kLineWords <= width; k += kLineWords) {
    if (ahead_bytes != 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        // As an integer: a pointer past the record may not even be formed. A prefetch never faults.
        const uintptr_t ahead = reinterpret_cast<uintptr_t>(rows[n] + k) + ahead_bytes;
        __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 3);
      }
    }
#pragma GCC unroll 8
    for (size_t block = 0; block < kLineWords; block += T::kBlock) accumulate<T>(acc, rows, x, k + block, k + block);
  }
  for (; k + T::kBlock <= width; k += T::kBlock) accumulate<T>(acc, rows, x, k, k);
  if (k < width) {
    Word tail[N][T::kBlock] = {};
    const Word* tail_rows[N];
    for (int n = 0; n < N; ++n) {
      std::memcpy(tail[n], rows[n] + k, (width - k) * sizeof(Word));
      tail_rows[n] = tail[n];
    }
    accumulate<T>(acc, tail_rows, x, 0, k);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) out[m][n] = T::sum(acc[m][n]);
  }
}

// A tile of M tokens, or of the fewer that are left, and its store.
template <class T, int M, int N, class Store>
FLASHMOE_INLINE void tile_of(size_t num_left, const typename T::Word* const (&rows)[N], const void* const* x,
                             size_t width, size_t ahead_bytes, const Store& store, size_t first) {
  if constexpr (M > 1) {
    if (num_left < static_cast<size_t>(M)) {
      tile_of<T, M - 1, N>(num_left, rows, x, width, ahead_bytes, store, first);
      return;
    }
  }
  float out[M][N];
  tile<T, M, N>(rows, x + first, width, ahead_bytes, out);
  for (int m = 0; m < M; ++m) store(first + static_cast<size_t>(m), out[m]);
}

// All tokens times N rows, which come from memory for the first M tokens and from the cache for the others.
template <class T, int M, int N, class Store>
FLASHMOE_INLINE void all_tokens(const typename T::Word* const (&rows)[N], const void* const* x, size_t num_tokens,
                                size_t width, size_t ahead_bytes, const Store& store) {
  for (size_t first = 0; first < num_tokens; first += M) {
    tile_of<T, M, N>(num_tokens - first, rows, x, width, first == 0 ? ahead_bytes : 0, store, first);
  }
}

template <int N>
struct ProductStore {
  const ProductArgs& args;
  size_t row[N];

  void operator()(size_t token, const float (&sums)[N]) const {
    float* out = args.out[token];
    for (int n = 0; n < N; ++n) {
      if (args.scale == nullptr) {
        out[row[n]] = sums[n];
      } else {
        out[row[n]] += args.scale[token] * sums[n];
      }
    }
  }
};

template <class T, int M, int N>
FLASHMOE_INLINE void product_rows(const ProductArgs& args, size_t first, size_t stride) {
  const auto* weights = static_cast<const typename T::Word*>(args.weights);
  ProductStore<N> store{args, {}};
  const typename T::Word* rows[N];
  for (int n = 0; n < N; ++n) {
    store.row[n] = first + static_cast<size_t>(n) * stride;
    rows[n] = weights + store.row[n] * args.stride;
  }
  all_tokens<T, M, N>(rows, args.x, args.num_tokens, args.width, args.ahead_bytes, store);
}

// The rows of a tile are taken far apart: each is then a stream of its own that runs on into the next row.
template <class T>
void products(const ProductArgs& args) {
  const size_t stride = (args.end - args.begin) / T::kRows;
  for (size_t i = 0; i < stride; ++i) product_rows<T, T::kTokens, T::kRows>(args, args.begin + i, stride);
  for (size_t i = args.begin + stride * T::kRows; i < args.end; ++i) product_rows<T, 1, 1>(args, i, 0);
}

template <int N>
struct GateUpStore {
  const GateUpArgs& args;
  size_t unit[N / 2];

  void operator()(size_t token, const float (&sums)[N]) const {
    for (int n = 0; n < N / 2; ++n) args.out[token][unit[n]] = gated(sums[n], sums[N / 2 + n]);
  }
};

// Half of the rows of a tile are the gate's, the other half the same units' of the up projection.
template <class T>
void gate_up(const GateUpArgs& args) {
  constexpr int N = T::kRows, kUnits = N / 2;
  const auto* gate = static_cast<const typename T::Word*>(args.gate);
  const auto* up = static_cast<const typename T::Word*>(args.up);
  const size_t stride = (args.end - args.begin + kUnits - 1) / kUnits;
  for (size_t i = 0; i < stride; ++i) {
    GateUpStore<N> store{args, {}};
    const typename T::Word* rows[N];
    for (int n = 0; n < kUnits; ++n) {
      // The last tile of an odd number computes a unit twice.
      const size_t unit = args.begin + i + static_cast<size_t>(n) * stride;
      store.unit[n] = unit < args.end ? unit : args.end - 1;
      rows[n] = gate + store.unit[n] * args.width;
      rows[kUnits + n] = up + store.unit[n] * args.width;
    }
    all_tokens<T, T::kTokens, N>(rows, args.x, args.num_tokens, args.width, kAheadBytes, store);
  }
}

template <class T>
size_t packed_width(size_t width) {
  return (width + T::kBlock - 1) / T::kBlock * T::kBlock;
}

template <class T>
size_t packed_bytes(size_t width) {
  return packed_width<T>(width) * sizeof(typename T::X);
}

template <class T>
void pack(const float* x, size_t width, void* packed) {
  auto* to = static_cast<typename T::X*>(packed);
  size_t k = 0;
  for (; k + T::kBlock <= width; k += T::kBlock) T::pack_block(x + k, to + k);
  if (k < width) {
    float tail[T::kBlock] = {};
    std::memcpy(tail, x + k, (width - k) * sizeof(float));
    T::pack_block(tail, to + k);
  }
}

// Words are read in pairs, the even and the odd ones as a vector each: a token is packed in that order.
template <int kLanes>
FLASHMOE_INLINE void pack_even_odd(const float* x, float* packed, float (*round)(float)) {
  for (int i = 0; i < kLanes; ++i) {
    packed[i] = round(x[2 * i]);
    packed[kLanes + i] = round(x[2 * i + 1]);
  }
}

}  // namespace
}  // namespace flashmoe
