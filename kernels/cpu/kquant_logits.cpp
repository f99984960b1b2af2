// kquant_logits: y = cap · tanh(x · Wᵀ · multiplier / cap), the soft-capped output head, in
// float32.
#include "kquant_matmul.h"
#include "tanh.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

Status check_scalar(const char* name, double value, bool ok, const char* expected) {
  if (ok) return {};
  return Status::error(std::string(name) + ": expected " + expected + ", found " +
                       std::to_string(value));
}

Status check(const Tensor& x, const Tensor& weight, std::string_view qtype, double multiplier,
             double cap, QMatrix& w) {
  GLIMMER_RETURN_IF_ERROR(check_qmatrix(x, weight, "qtype", qtype, w));
  GLIMMER_RETURN_IF_ERROR(check_scalar("multiplier", multiplier,
                                       std::isfinite(static_cast<float>(multiplier)),
                                       "a finite float32 value"));
  const float c = static_cast<float>(cap);
  return check_scalar("cap", cap, cap == 0 || (std::isfinite(c) && c > 0),
                      "0 or a finite positive float32 value");
}

Status infer(const Tensor& x, const Tensor& weight, std::string_view qtype, double multiplier,
             double cap, Shape& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check(x, weight, qtype, multiplier, cap, w));
  out = shape_of(DType::F32, {x.size(0), w.n});
  return {};
}

void soft_cap(float* y, int64_t n, float multiplier, float cap) {
  const Vec scale = set1(multiplier), c = set1(cap);
  map_row(y, n, [&](auto at) {
    const Vec v = at(y) * scale;
    return cap > 0 ? c * tanh(v / c) : v;
  });
}

Status run(const Context& ctx, const Tensor& x, const Tensor& weight, std::string_view qtype,
           double multiplier, double cap, Tensor& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check(x, weight, qtype, multiplier, cap, w));
  static thread_local Scratch scratch;
  for_row_ranges(x.size(0), [&](int64_t first, int64_t last) {
    const Activations acts = prepare_activations(ctx, x, first, last, w.type, scratch);
    float* y = out.ptr<float>() + first * w.n;
    for_weight_blocks(ctx, w.n, w.k, acts.rows, [&](int64_t begin, int64_t end) {
      matmul_rows(acts, w, begin, end, y + begin, w.n);
      for (int64_t m = 0; m < acts.rows; ++m)
        soft_cap(y + m * w.n + begin, end - begin, static_cast<float>(multiplier),
                 static_cast<float>(cap));
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(kquant_logits, infer, run, "x", "weight", "qtype", "multiplier", "cap")
}  // namespace glimmer::GLIMMER_ISA_NS
