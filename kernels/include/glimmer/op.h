// How a kernel announces itself. A kernel file defines, in the namespace of the ISA it is compiled
// for, two plain functions over the arguments of its schema, in the schema's order:
//
//   Status infer(const Tensor& x, OptTensor weight, double eps, Shape& out);
//   Status run(const Context&, const Tensor& x, OptTensor weight, double eps, Tensor& out);
//
// `infer` checks every argument and gives the outputs' shapes; `run` may trust what it checked.
// GLIMMER_CPU_OP(rms_norm, infer, run, "x", "weight", "eps") puts them into the registry, which
// serves ExecuTorch and eager torch alike. Each kernels/cpu/*.cpp is compiled once per ISA.
#pragma once

#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>

#include "glimmer/tensor.h"

namespace glimmer {

enum class Isa : uint8_t { Scalar, Avx2, Avx512 };
constexpr int kIsaCount = 3;

// What the caller provides: threads and the numerical path.
struct Context {
  // Calls body(self, begin, end) on disjoint ranges that cover [0, n), possibly in parallel.
  using Body = void (*)(void* self, int64_t begin, int64_t end);
  using ParallelFor = void (*)(int64_t n, int64_t grain, Body body, void* self);

  ParallelFor parallel_for = nullptr;
  bool exact = false;  // K-quant matmuls keep float activations instead of int8 ones

  template <class F>
  void parallel(int64_t n, int64_t grain, F&& body) const {
    if (n <= 0) return;
    parallel_for(
        n, grain < 1 ? 1 : grain,
        [](void* self, int64_t begin, int64_t end) {
          (*static_cast<std::remove_reference_t<F>*>(self))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

using Arg = std::variant<std::monostate, Tensor, double, int64_t, bool, std::string_view>;

struct OpKernel {
  const char* name = nullptr;
  Isa isa = Isa::Scalar;
  int n_args = 0;
  const char* const* args = nullptr;  // their names, as errors give them
  int n_outs = 0;
  Status (*infer)(Arg* args, Shape* outs) = nullptr;
  Status (*run)(const Context& ctx, Arg* args, Tensor* outs) = nullptr;
  const OpKernel* next = nullptr;
};

// A static list: registration runs before main and must not allocate or execute ISA code.
void register_kernel(OpKernel* kernel);

namespace detail {

inline Status wrong_type(const char* name, const char* expected) {
  return Status::error(std::string(name) + ": expected " + expected);
}

// Unboxes args[i] into a parameter of type T.
template <class T>
struct Unbox;

template <>
struct Unbox<const Tensor&> {
  static constexpr const char* what = "a tensor";
  static bool is(const Arg& a) { return std::holds_alternative<Tensor>(a); }
  static const Tensor& get(const Arg& a) { return std::get<Tensor>(a); }
};
template <>
struct Unbox<OptTensor> {
  static constexpr const char* what = "a tensor or None";
  static bool is(const Arg& a) {
    return std::holds_alternative<Tensor>(a) || std::holds_alternative<std::monostate>(a);
  }
  static OptTensor get(const Arg& a) { return std::get_if<Tensor>(&a); }
};
template <>
struct Unbox<double> {
  static constexpr const char* what = "a float";
  static bool is(const Arg& a) {
    return std::holds_alternative<double>(a) || std::holds_alternative<int64_t>(a);
  }
  static double get(const Arg& a) {
    if (auto* i = std::get_if<int64_t>(&a)) return static_cast<double>(*i);
    return std::get<double>(a);
  }
};
template <>
struct Unbox<OptDouble> {
  static constexpr const char* what = "a float or None";
  static bool is(const Arg& a) {
    return Unbox<double>::is(a) || std::holds_alternative<std::monostate>(a);
  }
  static OptDouble get(const Arg& a) {
    if (std::holds_alternative<std::monostate>(a)) return std::nullopt;
    return Unbox<double>::get(a);
  }
};
template <>
struct Unbox<int64_t> {
  static constexpr const char* what = "an int";
  static bool is(const Arg& a) { return std::holds_alternative<int64_t>(a); }
  static int64_t get(const Arg& a) { return std::get<int64_t>(a); }
};
template <>
struct Unbox<bool> {
  static constexpr const char* what = "a bool";
  static bool is(const Arg& a) { return std::holds_alternative<bool>(a); }
  static bool get(const Arg& a) { return std::get<bool>(a); }
};
template <>
struct Unbox<std::string_view> {
  static constexpr const char* what = "a str";
  static bool is(const Arg& a) { return std::holds_alternative<std::string_view>(a); }
  static std::string_view get(const Arg& a) { return std::get<std::string_view>(a); }
};

template <class Tuple, size_t... I>
Status check_args(Arg* args, const char* const* names, std::index_sequence<I...>) {
  Status status;
  (void)((Unbox<std::tuple_element_t<I, Tuple>>::is(args[I]) ||
          (status = wrong_type(names[I], Unbox<std::tuple_element_t<I, Tuple>>::what), false)) &&
         ...);
  for (size_t i = 0; i < sizeof...(I); ++i)
    if (auto* t = std::get_if<Tensor>(&args[i])) t->name = names[i];
  return status;
}

template <class T>
constexpr bool is_out = std::is_same_v<T, Shape&> || std::is_same_v<T, Tensor&>;

template <class... P>
constexpr int count_outs() {
  return (0 + ... + (is_out<P> ? 1 : 0));
}

// Calls `infer(args..., Shape& outs...)`.
template <auto F, const auto& Names>
struct Infer;
template <class... P, Status (*F)(P...), const auto& Names>
struct Infer<F, Names> {
  static constexpr int n_outs = count_outs<P...>();
  static constexpr int n_args = static_cast<int>(sizeof...(P)) - n_outs;
  using Params = std::tuple<P...>;
  template <size_t... A, size_t... O>
  static Status apply(Arg* args, Shape* outs, std::index_sequence<A...>,
                      std::index_sequence<O...>) {
    Status status = check_args<Params>(args, Names, std::index_sequence<A...>());
    if (!status.ok()) return status;
    return F(Unbox<std::tuple_element_t<A, Params>>::get(args[A])..., outs[O]...);
  }
  static Status call(Arg* args, Shape* outs) {
    return apply(args, outs, std::make_index_sequence<n_args>(),
                 std::make_index_sequence<n_outs>());
  }
};

// Calls `run(ctx, args..., Tensor& outs...)`.
template <auto F, const auto& Names>
struct Run;
template <class... P, Status (*F)(const Context&, P...), const auto& Names>
struct Run<F, Names> {
  static constexpr int n_outs = count_outs<P...>();
  static constexpr int n_args = static_cast<int>(sizeof...(P)) - n_outs;
  using Params = std::tuple<P...>;
  template <size_t... A, size_t... O>
  static Status apply(const Context& ctx, Arg* args, Tensor* outs, std::index_sequence<A...>,
                      std::index_sequence<O...>) {
    Status status = check_args<Params>(args, Names, std::index_sequence<A...>());
    if (!status.ok()) return status;
    return F(ctx, Unbox<std::tuple_element_t<A, Params>>::get(args[A])..., outs[O]...);
  }
  static Status call(const Context& ctx, Arg* args, Tensor* outs) {
    return apply(ctx, args, outs, std::make_index_sequence<n_args>(),
                 std::make_index_sequence<n_outs>());
  }
};

}  // namespace detail
}  // namespace glimmer

// Set by the build: the ISA this translation unit is compiled for, and its namespace.
#if defined(GLIMMER_ISA_AVX512)
#define GLIMMER_ISA_NS avx512
#define GLIMMER_ISA_VALUE ::glimmer::Isa::Avx512
#elif defined(GLIMMER_ISA_AVX2)
#define GLIMMER_ISA_NS avx2
#define GLIMMER_ISA_VALUE ::glimmer::Isa::Avx2
#else
#define GLIMMER_ISA_NS scalar
#define GLIMMER_ISA_VALUE ::glimmer::Isa::Scalar
#endif

// Registration runs on every machine, whatever this file's ISA: keep vector instructions out of it.
#if defined(__x86_64__) && (defined(GLIMMER_ISA_AVX512) || defined(GLIMMER_ISA_AVX2))
#define GLIMMER_BASELINE __attribute__((target("no-avx"), noinline))
#else
#define GLIMMER_BASELINE __attribute__((noinline))
#endif

// Priority 200: before any other static initialiser of the library.
#define GLIMMER_CPU_OP(op, infer_fn, run_fn, ...)                                  \
  static constexpr const char* op##_args[] = {__VA_ARGS__};                        \
  static_assert(sizeof(op##_args) / sizeof(op##_args[0]) ==                        \
                ::glimmer::detail::Infer<&infer_fn, op##_args>::n_args);           \
  static ::glimmer::OpKernel op##_kernel = {                                       \
      #op,                                                                         \
      GLIMMER_ISA_VALUE,                                                           \
      ::glimmer::detail::Infer<&infer_fn, op##_args>::n_args,                      \
      op##_args,                                                                   \
      ::glimmer::detail::Infer<&infer_fn, op##_args>::n_outs,                      \
      ::glimmer::detail::Infer<&infer_fn, op##_args>::call,                        \
      ::glimmer::detail::Run<&run_fn, op##_args>::call,                            \
      nullptr};                                                                    \
  __attribute__((constructor(200))) GLIMMER_BASELINE static void op##_register() { \
    ::glimmer::register_kernel(&op##_kernel);                                      \
  }
