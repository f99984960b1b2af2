#include "op_call.h"

#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <mutex>

#ifndef ET_USE_THREADPOOL
#error "executorch::runtime must be linked with its thread pool: parallel_for would be serial"
#endif

namespace glimmer {
namespace {

void executorch_parallel_for(int64_t n, int64_t grain, Context::Body body, void* self) {
  executorch::extension::parallel_for(0, n, grain,
                                      [=](int64_t begin, int64_t end) { body(self, begin, end); });
}

std::mutex g_error_mutex;
std::string g_error;

}  // namespace

Context host_context() {
  return {executorch_parallel_for, exact_mode()};
}

Status infer_op(int i, Arg* args, Shape* outs) {
  GLIMMER_RETURN_IF_ERROR(isa_status());
  return op_kernel(i).infer(args, outs);
}

Status run_op(int i, Arg* args, Tensor* outs) {
  return op_kernel(i).run(host_context(), args, outs);
}

void set_op_error(std::string message) {
  std::lock_guard<std::mutex> lock(g_error_mutex);
  g_error = std::move(message);
}

std::string take_op_error() {
  std::lock_guard<std::mutex> lock(g_error_mutex);
  return std::exchange(g_error, {});
}

}  // namespace glimmer
