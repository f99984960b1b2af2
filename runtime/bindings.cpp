// The Python module glimmer_ops._C: eager calls with raw pointers (no libtorch), and the session.
#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>

#include "glimmer/scratch.h"
#include "op_call.h"

namespace py = pybind11;

namespace glimmer {
namespace {

constexpr DType kDTypes[] = {DType::F32, DType::F16, DType::BF16, DType::U8,
                             DType::I32, DType::I64, DType::Bool};

Tensor to_tensor(const py::tuple& t) {  // (data_ptr, dtype code, sizes)
  Tensor out;
  out.data = reinterpret_cast<void*>(t[0].cast<uintptr_t>());
  out.dtype = kDTypes[t[1].cast<int>()];
  for (const auto size : t[2].cast<py::tuple>()) {
    if (out.ndim == kMaxDims) throw py::value_error("a tensor has more than 4 dimensions");
    out.sizes[out.ndim++] = size.cast<int64_t>();
  }
  return out;
}

Arg to_arg(const py::handle& v, std::string& text) {
  if (v.is_none()) return std::monostate{};
  if (py::isinstance<py::tuple>(v)) return to_tensor(v.cast<py::tuple>());
  if (py::isinstance<py::bool_>(v)) return v.cast<bool>();
  if (py::isinstance<py::int_>(v)) return v.cast<int64_t>();
  if (py::isinstance<py::float_>(v)) return v.cast<double>();
  text = v.cast<std::string>();
  return std::string_view(text);
}

struct Args {
  explicit Args(const py::list& list) : texts(list.size()), args(list.size()) {
    for (size_t i = 0; i < list.size(); ++i) args[i] = to_arg(list[i], texts[i]);
  }
  std::vector<std::string> texts;
  std::vector<Arg> args;
};

int op_index(const std::string& name, size_t n_args) {
  const int i = find_op(name);
  if (i < 0) throw py::key_error("no CPU kernel named '" + name + "'");
  if (static_cast<int>(n_args) != op_kernel(i).n_args)
    throw py::value_error(name + ": expected " + std::to_string(op_kernel(i).n_args) +
                          " arguments, found " + std::to_string(n_args));
  return i;
}

py::list infer(const std::string& name, const py::list& list) {
  Args a(list);
  const int i = op_index(name, list.size());
  std::vector<Shape> shapes(op_kernel(i).n_outs);
  const Status status = infer_op(i, a.args.data(), shapes.data());
  if (!status.ok()) throw py::value_error(name + ": " + status.message());
  py::list result;
  for (const Shape& s : shapes) {
    py::tuple sizes(s.ndim);
    for (int d = 0; d < s.ndim; ++d) sizes[d] = s.sizes[d];
    result.append(py::make_tuple(static_cast<int>(s.dtype), sizes));
  }
  return result;
}

void run(const std::string& name, const py::list& list, const py::list& out_list) {
  Args a(list);
  const int i = op_index(name, list.size());
  const int n_outs = op_kernel(i).n_outs;
  if (static_cast<int>(out_list.size()) != n_outs)
    throw py::value_error(name + ": expected " + std::to_string(n_outs) + " outputs");
  std::vector<Shape> shapes(n_outs);
  std::vector<Tensor> outs;
  for (const auto o : out_list) outs.push_back(to_tensor(o.cast<py::tuple>()));
  Status status = infer_op(i, a.args.data(), shapes.data());
  for (int o = 0; o < n_outs && status.ok(); ++o) {
    outs[o].name = "out";
    status = expect_shape(outs[o], shapes[o]);
  }
  if (status.ok()) {
    py::gil_scoped_release release;
    status = run_op(i, a.args.data(), outs.data());
  }
  if (!status.ok()) throw py::value_error(name + ": " + status.message());
}

// Runs an op on sets of arguments that take turns, and times it without Python.
class Timer {
 public:
  Timer(const std::string& name, const py::list& arg_sets, const py::list& out_sets)
      : name_(name), n_args_(arg_sets.empty() ? 0 : py::len(arg_sets[0])) {
    if (arg_sets.empty() || arg_sets.size() != out_sets.size())
      throw py::value_error(name + ": expected as many sets of outputs as of arguments, not 0");
    op_ = op_index(name, n_args_);
    for (const auto args : arg_sets) {
      args_.push_back(std::make_unique<Args>(args.cast<py::list>()));
      if (args_.back()->args.size() != n_args_) throw py::value_error(name + ": uneven sets");
    }
    for (const auto outs : out_sets) {
      outs_.emplace_back();
      for (const auto o : outs.cast<py::list>())
        outs_.back().push_back(to_tensor(o.cast<py::tuple>()));
    }
    for (size_t i = 0; i < args_.size(); ++i) check(i);
  }

  // Nanoseconds of `calls` calls on the sets from `start` on, after `warm` untimed ones on those
  // before. Each call checks its arguments, as a call by ExecuTorch does.
  int64_t run(size_t start, size_t warm, size_t calls) {
    const size_t n = args_.size();
    std::vector<Shape> shapes(op_kernel(op_).n_outs);
    Status status;
    int64_t ns;
    {
      py::gil_scoped_release release;
      for (size_t i = 0; i < warm; ++i) call((start + n * warm - warm + i) % n, shapes, status);
      const auto begin = std::chrono::steady_clock::now();
      for (size_t i = 0; i < calls; ++i) call((start + i) % n, shapes, status);
      const auto end = std::chrono::steady_clock::now();
      ns = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    }
    if (!status.ok()) throw py::value_error(name_ + ": " + status.message());
    return ns;
  }

 private:
  void check(size_t i) {
    std::vector<Shape> shapes(op_kernel(op_).n_outs);
    Status status = infer_op(op_, args_[i]->args.data(), shapes.data());
    if (status.ok() && outs_[i].size() != shapes.size())
      status = Status::error("out: expected " + std::to_string(shapes.size()) + " outputs");
    for (size_t o = 0; o < shapes.size() && status.ok(); ++o) {
      outs_[i][o].name = "out";
      status = expect_shape(outs_[i][o], shapes[o]);
    }
    if (!status.ok()) throw py::value_error(name_ + ": " + status.message());
  }

  void call(size_t i, std::vector<Shape>& shapes, Status& status) {
    if (status.ok()) status = infer_op(op_, args_[i]->args.data(), shapes.data());
    if (status.ok()) status = run_op(op_, args_[i]->args.data(), outs_[i].data());
  }

  std::string name_;
  size_t n_args_;
  int op_ = -1;
  std::vector<std::unique_ptr<Args>> args_;  // their texts must not move
  std::vector<std::vector<Tensor>> outs_;
};

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (int i = 0; i < op_count(); ++i) names.emplace_back(op_name(i));
  return names;
}

std::vector<std::string> arg_names(const std::string& name) {
  const int i = find_op(name);
  if (i < 0) throw py::key_error("no CPU kernel named '" + name + "'");
  const OpKernel& kernel = op_kernel(i);
  return {kernel.args, kernel.args + kernel.n_args};
}

std::vector<std::string> names_of(const std::vector<Isa>& isas) {
  std::vector<std::string> names;
  for (Isa isa : isas) names.emplace_back(isa_name(isa));
  return names;
}

void set_isa(const std::string& name) {
  const Status status = select_isa(name);
  if (!status.ok()) throw py::value_error(status.message());
}

}  // namespace
}  // namespace glimmer

PYBIND11_MODULE(_C, m) {
  using namespace glimmer;
  m.doc() = "CPU kernels, page pool and session of glimmer_ops.";
  m.def("infer", &infer, py::arg("op"), py::arg("args"));
  m.def("run", &run, py::arg("op"), py::arg("args"), py::arg("outs"));
  py::class_<Timer>(m, "Timer")
      .def(py::init<const std::string&, const py::list&, const py::list&>(), py::arg("op"),
           py::arg("arg_sets"), py::arg("out_sets"))
      .def("run", &Timer::run, py::arg("start"), py::arg("warm"), py::arg("calls"));
  m.def("op_names", &op_names, "Ops that have a CPU kernel.");
  m.def("arg_names", &arg_names, py::arg("op"), "A kernel's names of its arguments.");
  m.def(
      "isas", [] { return names_of(available_isas()); },
      "ISAs this machine can run, weakest first.");
  m.def(
      "compiled_isas", [] { return names_of(compiled_isas()); },
      "ISAs this build has kernels for, weakest first.");
  m.def("isa", [] { return isa_name(selected_isa()); }, "The ISA in use.");
  m.def("set_isa", &set_isa, py::arg("name"));
  m.def("exact", &exact_mode, "Whether K-quant matmuls keep float activations.");
  m.def("set_exact", &set_exact_mode, py::arg("exact"));
  m.def("isa_error", [] { return isa_status().message(); });
  m.def("set_poison_scratch", &set_poison_scratch, py::arg("on"),
        "Fills kernel scratch memory with 0xFF each time, for tests.");
  bind_session(m);
}
