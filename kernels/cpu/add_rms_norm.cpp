// add_rms_norm: residual' = residual + rms_norm(x, post); normed = rms_norm(residual', next).
// Without post_eps there is no post-norm: residual' = residual + x.
#include "norm.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

Status infer(const Tensor& residual, const Tensor& x, OptTensor post_weight, OptDouble post_eps,
             OptTensor next_weight, double next_eps, Shape& sum, Shape& normed) {
  GLIMMER_RETURN_IF_ERROR(expect_float(residual));
  GLIMMER_RETURN_IF_ERROR(expect_dims(residual, 2));
  GLIMMER_RETURN_IF_ERROR(expect(residual.size(1) > 0, residual, "a non-empty last dimension"));
  GLIMMER_RETURN_IF_ERROR(expect_shape(x, shape_like(residual)));
  GLIMMER_RETURN_IF_ERROR(check_norm_weight(post_weight, residual.size(1)));
  if (post_weight)
    GLIMMER_RETURN_IF_ERROR(expect(post_eps.has_value(), *post_weight, "None without post_eps"));
  if (post_eps) GLIMMER_RETURN_IF_ERROR(check_eps("post_eps", *post_eps));
  GLIMMER_RETURN_IF_ERROR(check_norm_weight(next_weight, residual.size(1)));
  GLIMMER_RETURN_IF_ERROR(check_eps("next_eps", next_eps));
  sum = normed = shape_like(residual);
  return {};
}

// sum = residual + x · inv · weight in float32, rounded once to T.
template <class T>
void add_scaled_row(const T* residual, const T* x, const NormWeight& weight, float inv, T* sum,
                    int64_t dim) {
  const float* w = weight.data();
  const Vec s = set1(inv);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Vec v = load(x + i) * s;
    store(sum + i, load(residual + i) + (w ? v * load(w + i) : v));
  }
  if (i < dim) {
    const int n = static_cast<int>(dim - i);
    const Vec v = load_tail(x + i, n) * s;
    store_tail(sum + i, load_tail(residual + i, n) + (w ? v * load_tail(w + i, n) : v), n);
  }
}

Status run(const Context& ctx, const Tensor& residual, const Tensor& x, OptTensor post_weight,
           OptDouble post_eps, OptTensor next_weight, double next_eps, Tensor& sum,
           Tensor& normed) {
  const int64_t dim = x.size(1);
  const NormWeight post(post_weight, dim), next(next_weight, dim);
  with_float_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    ctx.parallel(x.size(0), rows_per_task(dim), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x.ptr<T>() + r * dim;
        T* sum_row = sum.ptr<T>() + r * dim;
        const float inv = post_eps ? inverse_rms(row, dim, *post_eps) : 1.0f;
        add_scaled_row(residual.ptr<T>() + r * dim, row, post, inv, sum_row, dim);
        // The rounded sum, so that the fused op equals the two ops it replaces.
        scale_row(sum_row, next, inverse_rms(sum_row, dim, next_eps), normed.ptr<T>() + r * dim,
                  dim);
      }
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(add_rms_norm, infer, run, "residual", "x", "post_weight", "post_eps", "next_weight",
               "next_eps")
}  // namespace glimmer::GLIMMER_ISA_NS
