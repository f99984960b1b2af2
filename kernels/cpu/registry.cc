#include "glimmer/registry.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace glimmer {
namespace {

OpKernel* g_kernels = nullptr;  // filled by constructors, before anything reads it

struct Op {
  const char* name;
  const OpKernel* by_isa[kIsaCount];
};

const std::vector<Op>& ops() {
  static const std::vector<Op> table = [] {
    std::vector<Op> t;
    for (const OpKernel* k = g_kernels; k; k = k->next) {
      auto it = std::find_if(t.begin(), t.end(),
                             [&](const Op& op) { return !std::strcmp(op.name, k->name); });
      if (it == t.end()) it = t.insert(t.end(), Op{k->name, {}});
      it->by_isa[static_cast<int>(k->isa)] = k;
    }
    std::sort(t.begin(), t.end(),
              [](const Op& a, const Op& b) { return std::strcmp(a.name, b.name) < 0; });
    return t;
  }();
  return table;
}

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::Avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::Avx512:
      return cpu_has(Isa::Avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    default:
      return true;
  }
#else
  return isa == Isa::Scalar;
#endif
}

std::atomic<int>& isa_slot() {
  static std::atomic<int> slot{static_cast<int>(available_isas().back())};
  return slot;
}

std::atomic<bool>& exact_slot() {
  static std::atomic<bool> slot{[] {
    const char* v = std::getenv("GLIMMER_EXACT");
    return v && !std::strcmp(v, "1");
  }()};
  return slot;
}

Status set_isa(const std::string& name) {
  const auto have = available_isas();
  if (name == "auto") {
    isa_slot() = static_cast<int>(have.back());
    return {};
  }
  std::string names;
  for (Isa isa : have) {
    if (name == isa_name(isa)) {
      isa_slot() = static_cast<int>(isa);
      return {};
    }
    names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return Status::error("GLIMMER_CPU_ISA: expected auto or one that this CPU has (" + names +
                       "), found '" + name + "'");
}

}  // namespace

void register_kernel(OpKernel* kernel) {
  kernel->next = g_kernels;
  g_kernels = kernel;
}

const char* isa_name(Isa isa) {
  return isa == Isa::Avx512 ? "avx512" : isa == Isa::Avx2 ? "avx2" : "scalar";
}

std::vector<Isa> compiled_isas() {
  std::vector<Isa> r;
  for (Isa isa : {Isa::Scalar, Isa::Avx2, Isa::Avx512})
    if (std::any_of(ops().begin(), ops().end(),
                    [&](const Op& op) { return op.by_isa[static_cast<int>(isa)] != nullptr; }))
      r.push_back(isa);
  return r;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> r = compiled_isas();
  r.erase(std::remove_if(r.begin(), r.end(), [](Isa isa) { return !cpu_has(isa); }), r.end());
  return r;
}

const Status& isa_status() {
  static const Status status = [] {
    const char* v = std::getenv("GLIMMER_CPU_ISA");
    return v && *v ? set_isa(v) : Status();
  }();
  return status;
}

Isa selected_isa() {
  (void)isa_status();
  return static_cast<Isa>(isa_slot().load(std::memory_order_relaxed));
}

Status select_isa(const std::string& name) {
  (void)isa_status();
  return set_isa(name);
}

int op_count() {
  return static_cast<int>(ops().size());
}
const char* op_name(int i) {
  return ops()[i].name;
}

int find_op(std::string_view name) {
  for (int i = 0; i < op_count(); ++i)
    if (name == ops()[i].name) return i;
  return -1;
}

const OpKernel& op_kernel(int i) {
  const Op& op = ops()[i];
  for (int isa = static_cast<int>(selected_isa()); isa > 0; --isa)
    if (op.by_isa[isa]) return *op.by_isa[isa];
  return *op.by_isa[0];
}

bool exact_mode() {
  return exact_slot().load(std::memory_order_relaxed);
}
void set_exact_mode(bool exact) {
  exact_slot() = exact;
}

}  // namespace glimmer
