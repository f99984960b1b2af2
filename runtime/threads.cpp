// Access to ExecuTorch's thread pool.
#include "threads.h"

#include <cstddef>
#include <stdexcept>
#include <string>

#include "executorch_log.h"

// The pip package exports these but ships no header for them (executorch 1.5.1, threadpool.h).
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t num_threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace glimmer {
namespace {

constexpr int64_t kMaxThreads = 1024;

executorch::extension::threadpool::ThreadPool& pool() {
  LogCapture quiet;
  auto* p = executorch::extension::threadpool::get_threadpool();
  if (!p) throw std::runtime_error("executorch's thread pool could not be created");
  return *p;
}

}  // namespace

int64_t thread_count() {
  return static_cast<int64_t>(pool().get_thread_count());
}

void set_thread_count(int64_t n) {
  if (n < 1 || n > kMaxThreads)
    throw std::invalid_argument("threads: expected a value in [1, " + std::to_string(kMaxThreads) +
                                "], found " + std::to_string(n));
  if (!pool()._unsafe_reset_threadpool(static_cast<uint32_t>(n)) || thread_count() != n)
    throw std::runtime_error("threads: executorch's thread pool refused " + std::to_string(n));
}

}  // namespace glimmer
