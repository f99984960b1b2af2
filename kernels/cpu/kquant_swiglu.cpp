// kquant_swiglu: y = silu(x · Gᵀ) ⊙ (x · Uᵀ) for encoded gate and up rows, which may differ in
// type.
#include "kquant_matmul.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

struct GateUp {
  QMatrix gate, up;
};

Status check(const Tensor& x, const Tensor& gate, std::string_view gate_qtype, const Tensor& up,
             std::string_view up_qtype, GateUp& w) {
  GLIMMER_RETURN_IF_ERROR(check_qmatrix(x, gate, "gate_qtype", gate_qtype, w.gate));
  GLIMMER_RETURN_IF_ERROR(check_qmatrix(x, up, "up_qtype", up_qtype, w.up));
  return expect(up.size(0) == gate.size(0), up,
                std::to_string(gate.size(0)) + " rows, as gate has");
}

Status infer(const Tensor& x, const Tensor& gate, std::string_view gate_qtype, const Tensor& up,
             std::string_view up_qtype, Shape& out) {
  GateUp w;
  GLIMMER_RETURN_IF_ERROR(check(x, gate, gate_qtype, up, up_qtype, w));
  out = shape_of(x.dtype, {x.size(0), w.gate.n});
  return {};
}

template <class T>
void swiglu_block(const Activations& gate_x, const Activations& up_x, const GateUp& w,
                  int64_t begin, int64_t end, T* y) {
  static thread_local Scratch scratch;
  const int64_t n = end - begin, size = gate_x.rows * n;
  float* gate = scratch.get<float>(static_cast<size_t>(2 * size));
  float* up = gate + size;
  matmul_rows(gate_x, w.gate, begin, end, gate, n);
  matmul_rows(up_x, w.up, begin, end, up, n);
  for (int64_t m = 0; m < gate_x.rows; ++m)
    map_row(y + m * w.gate.n + begin, n,
            [&](auto at) { return silu(at(gate + m * n)) * at(up + m * n); });
}

Status run(const Context& ctx, const Tensor& x, const Tensor& gate, std::string_view gate_qtype,
           const Tensor& up, std::string_view up_qtype, Tensor& out) {
  GateUp w;
  GLIMMER_RETURN_IF_ERROR(check(x, gate, gate_qtype, up, up_qtype, w));
  const bool shared = act_layout(w.gate.type, ctx.exact) == act_layout(w.up.type, ctx.exact);
  static thread_local Scratch gate_scratch, up_scratch;
  for_row_ranges(x.size(0), [&](int64_t first, int64_t last) {
    const Activations gate_x = prepare_activations(ctx, x, first, last, w.gate.type, gate_scratch);
    const Activations up_x =
        shared ? gate_x : prepare_activations(ctx, x, first, last, w.up.type, up_scratch);
    with_float_type(x.dtype, [&](auto t) {
      auto* y = out.ptr<decltype(t)>() + first * w.gate.n;
      for_weight_blocks(ctx, w.gate.n, 2 * w.gate.k, gate_x.rows, [&](int64_t begin, int64_t end) {
        swiglu_block(gate_x, up_x, w, begin, end, y);
      });
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(kquant_swiglu, infer, run, "x", "gate", "gate_qtype", "up", "up_qtype")
}  // namespace glimmer::GLIMMER_ISA_NS
