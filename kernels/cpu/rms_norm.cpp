// rms_norm: y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.
#include "norm.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

Status infer(const Tensor& x, OptTensor weight, double eps, Shape& out) {
  GLIMMER_RETURN_IF_ERROR(expect_float(x));
  GLIMMER_RETURN_IF_ERROR(
      expect(x.ndim >= 1 && x.size(x.ndim - 1) > 0, x, "a non-empty last dimension"));
  GLIMMER_RETURN_IF_ERROR(check_norm_weight(weight, x.size(x.ndim - 1)));
  GLIMMER_RETURN_IF_ERROR(check_eps("eps", eps));
  out = shape_like(x);
  return {};
}

Status run(const Context& ctx, const Tensor& x, OptTensor weight, double eps, Tensor& out) {
  const int64_t dim = x.size(x.ndim - 1);
  const NormWeight w(weight, dim);
  with_float_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    ctx.parallel(x.numel() / dim, rows_per_task(dim), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x.ptr<T>() + r * dim;
        scale_row(row, w, inverse_rms(row, dim, eps), out.ptr<T>() + r * dim, dim);
      }
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(rms_norm, infer, run, "x", "weight", "eps")
}  // namespace glimmer::GLIMMER_ISA_NS
