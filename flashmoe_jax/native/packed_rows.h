// Tokens rounded and laid out as the products read them, and the sizes that go with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "isa.h"

namespace flashmoe {

inline size_t word_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

constexpr size_t kLine = 64;  // bytes of a cache line

// Rows of packed tokens, cache line aligned, not initialised.
class PackedRows {
 public:
  PackedRows(const Kernels& kernels, size_t num_rows, size_t width)
      : kernels_(kernels), width_(width), stride_(ceil_div(kernels.packed_bytes(width), kLine) * kLine),
        memory_(new unsigned char[num_rows * stride_ + kLine]) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    base_ = memory_.get() + (kLine - address % kLine);
  }

  void* row(size_t i) const { return base_ + i * stride_; }
  size_t stride() const { return stride_; }

  // Packs num_rows rows; source(i) is the float32 row of each.
  template <class Source>
  void pack(Executor& executor, size_t num_rows, const Source& source) {
    constexpr size_t kRowsPerChunk = 8;
    parallel_for(executor, ceil_div(num_rows, kRowsPerChunk), [&](size_t chunk) {
      const size_t end = std::min(num_rows, (chunk + 1) * kRowsPerChunk);
      for (size_t i = chunk * kRowsPerChunk; i < end; ++i) kernels_.pack(source(i), width_, row(i));
    });
  }

 private:
  const Kernels& kernels_;
  size_t width_, stride_;
  std::unique_ptr<unsigned char[]> memory_;
  unsigned char* base_;
};

}  // namespace flashmoe
