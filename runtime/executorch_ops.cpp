// Registers every op of the registry with ExecuTorch as glimmer::<op>.out, once per process.
//
// ExecuTorch calls a kernel through a bare function pointer, so op i gets the i-th of a fixed set
// of functions. A second copy of this library finds the names taken and registers nothing.
#include <executorch/runtime/core/event_tracer_hooks.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <array>

#include "executorch_tensor.h"
#include "op_call.h"

namespace glimmer {
namespace {

namespace et = executorch::runtime;

constexpr int kMaxOps = 64;
constexpr int kMaxArgs = 24;
constexpr int kMaxOuts = 4;

Status to_arg(const et::EValue& v, Arg& arg) {
  if (v.isNone()) {
    arg = std::monostate{};
  } else if (v.isTensor()) {
    Tensor t;
    GLIMMER_RETURN_IF_ERROR(to_tensor(v.toTensor(), t));
    arg = t;
  } else if (v.isDouble()) {
    arg = v.toDouble();
  } else if (v.isInt()) {
    arg = static_cast<int64_t>(v.toInt());
  } else if (v.isBool()) {
    arg = v.toBool();
  } else if (v.isString()) {
    arg = std::string_view(v.toString().data(), v.toString().size());
  } else {
    return Status::error("an argument has an unsupported type");
  }
  return {};
}

Status resize_out(executorch::aten::Tensor& t, const Shape& shape, Tensor& out) {
  std::array<executorch::aten::SizesType, kMaxDims> sizes{};
  for (int i = 0; i < shape.ndim; ++i)
    sizes[i] = static_cast<executorch::aten::SizesType>(shape.sizes[i]);
  if (et::resize_tensor(t, {sizes.data(), static_cast<size_t>(shape.ndim)}) != et::Error::Ok)
    return Status::error("out: " + to_string(shape) + " does not fit the planned memory");
  out.name = "out";
  GLIMMER_RETURN_IF_ERROR(to_tensor(t, out));
  return expect_shape(out, shape);
}

Status call(int i, et::Span<et::EValue*> stack) {
  const OpKernel& kernel = op_kernel(i);
  if (static_cast<int>(stack.size()) < kernel.n_args + kernel.n_outs)
    return Status::error("expected " + std::to_string(kernel.n_args + kernel.n_outs) +
                         " arguments, found " + std::to_string(stack.size()));
  Arg args[kMaxArgs];
  Shape shapes[kMaxOuts];
  Tensor outs[kMaxOuts];
  for (int a = 0; a < kernel.n_args; ++a) GLIMMER_RETURN_IF_ERROR(to_arg(*stack[a], args[a]));
  GLIMMER_RETURN_IF_ERROR(infer_op(i, args, shapes));
  for (int o = 0; o < kernel.n_outs; ++o)
    GLIMMER_RETURN_IF_ERROR(resize_out(stack[kernel.n_args + o]->toTensor(), shapes[o], outs[o]));
  return run_op(i, args, outs);
}

Status profiled_call(int i, et::EventTracer* tracer, et::Span<et::EValue*> stack) {
  et::internal::EventTracerProfileOpScope scope(tracer, op_name(i));
  return call(i, stack);
}

void log_outputs(int i, et::EventTracer* tracer, et::Span<et::EValue*> stack) {
  const OpKernel& kernel = op_kernel(i);
  for (int o = 0; tracer && o < kernel.n_outs; ++o)
    et::internal::event_tracer_log_evalue(tracer, *stack[kernel.n_args + o]);
}

template <int I>
void entry(et::KernelRuntimeContext& ctx, et::Span<et::EValue*> stack) {
  et::EventTracer* tracer = ctx.internal_event_tracer();
  const Status status = profiled_call(I, tracer, stack);
  if (status.ok()) return log_outputs(I, tracer, stack);
  const std::string message = std::string(op_name(I)) + ": " + status.message();
  ET_LOG(Error, "glimmer::%s", message.c_str());
  set_op_error(message);
  ctx.fail(et::Error::InvalidArgument);
}

template <int... I>
constexpr std::array<et::OpFunction, sizeof...(I)> entries(std::integer_sequence<int, I...>) {
  return {entry<I>...};
}

// Not registry_has_op_function(): it logs an error for every name it does not find.
bool is_registered(const std::string& name) {
  for (const et::Kernel& kernel : et::get_registered_kernels())
    if (name == kernel.name_) return true;
  return false;
}

bool register_all() {
  static const auto table = entries(std::make_integer_sequence<int, kMaxOps>());
  static std::array<std::string, kMaxOps> names;
  ET_CHECK_MSG(op_count() <= kMaxOps, "more than %d glimmer ops: raise kMaxOps", kMaxOps);
  for (int i = 0; i < op_count(); ++i) {
    names[i] = std::string("glimmer::") + op_name(i) + ".out";
    if (is_registered(names[i])) return false;
    const et::Error error = et::register_kernel(et::Kernel(names[i].c_str(), table[i]));
    ET_CHECK_MSG(error == et::Error::Ok, "could not register %s", names[i].c_str());
  }
  return true;
}

// Runs after the kernels' own constructors, which have a higher priority.
const bool g_registered = register_all();

}  // namespace
}  // namespace glimmer
