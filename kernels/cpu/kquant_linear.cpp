// kquant_linear: y = x · Wᵀ for encoded weight rows.
#include "kquant_matmul.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

Status infer(const Tensor& x, const Tensor& weight, std::string_view qtype, Shape& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check_qmatrix(x, weight, "qtype", qtype, w));
  out = shape_of(x.dtype, {x.size(0), w.n});
  return {};
}

// Results of a block go straight to a float32 output, through a buffer to a narrower one.
template <class T>
void linear_block(const Activations& x, const QMatrix& w, int64_t begin, int64_t end, T* y) {
  if constexpr (std::is_same_v<T, float>) {
    matmul_rows(x, w, begin, end, y + begin, w.n);
  } else {
    static thread_local Scratch scratch;
    const int64_t n = end - begin;
    float* block = scratch.get<float>(static_cast<size_t>(x.rows * n));
    matmul_rows(x, w, begin, end, block, n);
    for (int64_t m = 0; m < x.rows; ++m)
      map_row(y + m * w.n + begin, n, [&](auto at) { return at(block + m * n); });
  }
}

Status run(const Context& ctx, const Tensor& x, const Tensor& weight, std::string_view qtype,
           Tensor& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check_qmatrix(x, weight, "qtype", qtype, w));
  static thread_local Scratch scratch;
  for_row_ranges(x.size(0), [&](int64_t first, int64_t last) {
    const Activations acts = prepare_activations(ctx, x, first, last, w.type, scratch);
    with_float_type(x.dtype, [&](auto t) {
      auto* y = out.ptr<decltype(t)>() + first * w.n;
      for_weight_blocks(ctx, w.n, w.k, acts.rows,
                        [&](int64_t begin, int64_t end) { linear_block(acts, w, begin, end, y); });
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(kquant_linear, infer, run, "x", "weight", "qtype")
}  // namespace glimmer::GLIMMER_ISA_NS
