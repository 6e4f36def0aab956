// Loops over chunks on somebody else's thread pool.
#pragma once

#include <cstddef>
#include <functional>

namespace flashmoe {

// A pool of threads. A scheduled task may run at any time, in any thread, also in the caller's.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual size_t num_threads() const = 0;
  virtual void schedule(std::function<void()> task) = 0;
};

// Runs body(0) ... body(num_chunks - 1), each once, and returns when all are done. The caller works too and waits only
// for chunks that have begun, so a pool that is busy or has one thread cannot block it. Every chunk runs with the
// default floating point environment: rounding to nearest, denormals kept.
void parallel_for(Executor& executor, size_t num_chunks, const std::function<void(size_t)>& body);

}  // namespace flashmoe
