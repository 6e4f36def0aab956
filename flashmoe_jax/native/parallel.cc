#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace flashmoe {
namespace {

// XLA's threads flush denormals; whether the caller's does depends on who it is. Results must not.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(static_cast<unsigned long>(0)));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  unsigned long saved_;
#else
  FloatEnvironment() {}
  ~FloatEnvironment() {}
#endif
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Shared with the tasks: one that starts after the loop has ended finds no chunk and touches nothing else.
struct Loop {
  size_t num_chunks;
  const std::function<void(size_t)>* body;
  std::atomic<size_t> next{0};
  std::atomic<size_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  void work() {
    FloatEnvironment environment;
    size_t mine = 0;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks; ++mine) (*body)(i);
    if (mine != 0 && done.fetch_add(mine, std::memory_order_acq_rel) + mine == num_chunks) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }

  bool is_done() const { return done.load(std::memory_order_acquire) == num_chunks; }
};

constexpr int kSpins = 2000;  // some tens of microseconds, about what a thread needs to wake up

}  // namespace

void parallel_for(Executor& executor, size_t num_chunks, const std::function<void(size_t)>& body) {
  if (num_chunks == 0) return;
  auto loop = std::make_shared<Loop>();
  loop->num_chunks = num_chunks;
  loop->body = &body;
  const size_t num_threads = executor.num_threads();
  for (size_t i = 1; i < num_threads && i < num_chunks; ++i) executor.schedule([loop] { loop->work(); });
  loop->work();
  for (int i = 0; i < kSpins && !loop->is_done(); ++i) pause();
  if (loop->is_done()) return;
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->is_done(); });
}

}  // namespace flashmoe
