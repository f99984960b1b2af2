// Times come from ExecuTorch's own ETDump. Outputs are copied here, one call at a time, where an
// ETDump would need one buffer for all of them up front.
#include "tracers.h"

#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/runtime/platform/platform.h>

#include <cstdlib>
#include <utility>

#include "executorch_tensor.h"

namespace glimmer {
namespace {

namespace et = executorch::runtime;
using EtTensor = executorch::aten::Tensor;

class TimesTracer final : public executorch::etdump::ETDumpGen, public Tracer {
 public:
  // ExecuTorch calls every block "Execute"; whoever reads it needs to know of which method.
  void create_event_block(const char* name) override {
    ETDumpGen::create_event_block(method_.empty() ? name : method_.c_str());
  }

  Trace take() override {
    Trace trace;
    if (get_num_blocks() == 0) return trace;
    const executorch::etdump::ETDumpResult result = get_etdump_data();
    if (result.buf) trace.etdump.assign(static_cast<const char*>(result.buf), result.size);
    std::free(result.buf);
    reset();
    return trace;
  }
};

class OutputsTracer final : public et::EventTracer, public Tracer {
 public:
  OutputsTracer() {
    set_event_tracer_debug_level(et::EventTracerDebugLogLevel::kIntermediateOutputs);
    set_event_tracer_profiling_level(et::EventTracerProfilingLevel::kProfileMethodOnly);
  }

  Trace take() override {
    Trace trace;
    trace.outputs = std::exchange(outputs_, {});
    return trace;
  }

  et::Result<bool> log_evalue(const et::EValue& value, et::LoggedEValueType type) override {
    // The method's outputs are those of its last instructions.
    if (type == et::LoggedEValueType::kIntermediateOutput) log(value, "");
    return true;
  }
  et::Result<bool> log_intermediate_output_delegate(const char* name, et::DelegateDebugIntId id,
                                                    const EtTensor& output) override {
    add(output, name ? std::string(name) : std::to_string(id));
    return true;
  }
  et::Result<bool> log_intermediate_output_delegate(const char* name, et::DelegateDebugIntId id,
                                                    const et::ArrayRef<EtTensor> outputs) override {
    for (const EtTensor& output : outputs) log_intermediate_output_delegate(name, id, output);
    return true;
  }
  et::Result<bool> log_intermediate_output_delegate(const char*, et::DelegateDebugIntId,
                                                    const int&) override {
    return false;
  }
  et::Result<bool> log_intermediate_output_delegate(const char*, et::DelegateDebugIntId,
                                                    const bool&) override {
    return false;
  }
  et::Result<bool> log_intermediate_output_delegate(const char*, et::DelegateDebugIntId,
                                                    const double&) override {
    return false;
  }

  void set_delegation_intermediate_output_filter(et::EventTracerFilterBase*) override {}
  void create_event_block(const char*) override {}
  et::EventTracerEntry start_profiling(const char*, et::ChainID, et::DebugHandle) override {
    return {};
  }
  void end_profiling(et::EventTracerEntry) override {}
  et::EventTracerEntry start_profiling_delegate(const char*, et::DelegateDebugIntId) override {
    return {};
  }
  void end_profiling_delegate(et::EventTracerEntry, const void*, size_t) override {}
  void log_profiling_delegate(const char*, et::DelegateDebugIntId, et_timestamp_t, et_timestamp_t,
                              const void*, size_t) override {}
  void track_allocation(et::AllocatorID, size_t) override {}
  et::AllocatorID track_allocator(const char*) override { return 0; }

 private:
  void log(const et::EValue& value, const std::string& event) {
    if (value.isTensor()) add(value.toTensor(), event);
    if (!value.isTensorList()) return;
    for (const EtTensor& t : value.toTensorList()) add(t, event);
  }

  // Values that are no plain tensor of a dtype that kernels know are not what is compared.
  void add(const EtTensor& t, std::string event) {
    Tensor view;
    if (method_.empty() || !to_tensor(t, view).ok()) return;
    OpOutput out;
    out.method = method_;
    out.chain = current_chain_id();
    out.instruction = current_debug_handle();
    out.event = std::move(event);
    out.shape = view;
    const char* data = static_cast<const char*>(view.data);
    if (data) out.data.assign(data, data + t.nbytes());
    outputs_.push_back(std::move(out));
  }

  std::vector<OpOutput> outputs_;
};

template <class T>
std::unique_ptr<et::EventTracer> make(Tracer*& tracer) {
  auto made = std::make_unique<T>();
  tracer = made.get();
  return made;
}

}  // namespace

std::unique_ptr<et::EventTracer> make_tracer(TraceKind kind, Tracer*& tracer) {
  tracer = nullptr;
  if (kind == TraceKind::Times) return make<TimesTracer>(tracer);
  if (kind == TraceKind::Outputs) return make<OutputsTracer>(tracer);
  return nullptr;
}

double tick_nanoseconds() {
  const et_tick_ratio_t ratio = executorch::runtime::pal_ticks_to_ns_multiplier();
  return static_cast<double>(ratio.numerator) / static_cast<double>(ratio.denominator);
}

}  // namespace glimmer
