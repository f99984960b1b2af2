// The number of threads of ExecuTorch's pool, which runs every kernel.
#pragma once

#include <cstdint>

namespace glimmer {

int64_t thread_count();
// Throws std::invalid_argument unless 1 <= n <= 1024. No method may be running.
void set_thread_count(int64_t n);

}  // namespace glimmer
