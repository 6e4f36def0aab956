// Reads memory as fast as a core can, and does nothing else with it: the yardstick of the kernels and of the probe.
//
// One thread reads its block as 1, 2 or 4 interleaved streams, as memory controllers differ in which they serve best.
// Only loads limit it: the sums stay in registers, and every line is asked for well before it is needed. Plain loops,
// which any compiler turns into the vectors of the processor's family; wider ones would read no faster.
#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t kLine = 64;         // bytes of a cache line
constexpr size_t kPrefetch = 1024;   // bytes ahead
constexpr size_t kWords = kLine / 8;

template <int kStreams>
uint64_t sum_streams(const char* base, size_t size) {
  const size_t part = size / kStreams / kLine * kLine;
  uint64_t sums[kStreams][kWords] = {};
  for (size_t i = 0; i < part; i += kLine) {
    for (int s = 0; s < kStreams; ++s) {
      const char* at = base + static_cast<size_t>(s) * part + i;
      __builtin_prefetch(at + kPrefetch, 0, 3);
      const auto* words = reinterpret_cast<const uint64_t*>(at);
      for (size_t j = 0; j < kWords; ++j) sums[s][j] += words[j];
    }
  }
  uint64_t total = 0;
  for (int s = 0; s < kStreams; ++s) {
    for (size_t j = 0; j < kWords; ++j) total += sums[s][j];
  }
  return total;
}

}  // namespace

// Sum, modulo 2^64, of the 64-bit words of the whole cache lines of `streams` equal parts of the block, which starts at
// a multiple of 8 bytes. Any other number than 1, 2 or 4 reads nothing.
extern "C" __attribute__((visibility("default"))) uint64_t flashmoe_sum_streams(const char* base, size_t size,
                                                                                int streams) {
  switch (streams) {
    case 1:
      return sum_streams<1>(base, size);
    case 2:
      return sum_streams<2>(base, size);
    case 4:
      return sum_streams<4>(base, size);
    default:
      return 0;
  }
}
