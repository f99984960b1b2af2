// RMS normalisation of one row, shared by rms_norm, add_rms_norm and qk_norm_rope_kv.
#pragma once

#include <vector>

#include "glimmer/simd.h"

namespace glimmer::GLIMMER_ISA_NS {

inline Status check_eps(const char* name, double eps) {
  if (std::isfinite(eps) && eps >= 0) return {};
  return Status::error(std::string(name) + ": expected a finite value >= 0, found " +
                       std::to_string(eps));
}

inline Status check_norm_weight(OptTensor weight, int64_t dim) {
  if (!weight) return {};
  GLIMMER_RETURN_IF_ERROR(expect_float(*weight));
  return expect(weight->ndim == 1 && weight->size(0) == dim, *weight,
                "shape [" + std::to_string(dim) + "]");
}

// The gain as float, whatever it is stored as; empty when there is none.
class NormWeight {
 public:
  NormWeight(OptTensor weight, int64_t dim) {
    if (!weight) return;
    if (weight->dtype == DType::F32) {
      data_ = weight->ptr<float>();
      return;
    }
    widened_.resize(dim);
    with_float_type(weight->dtype, [&](auto t) {
      for (int64_t i = 0; i < dim; ++i) widened_[i] = to_float(weight->ptr<decltype(t)>()[i]);
    });
    data_ = widened_.data();
  }
  const float* data() const { return data_; }

 private:
  const float* data_ = nullptr;
  std::vector<float> widened_;
};

// About 16 k elements a task: a row of the model is worth a thread, a head is not.
inline int64_t rows_per_task(int64_t dim) {
  return dim >= 16384 ? 1 : (16384 + dim - 1) / dim;
}

template <class T>
inline double sum_of_squares(const T* x, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const double v = to_float(x[i]);
    sum += v * v;
  }
  return sum;
}

// 1 / sqrt(mean(x²) + eps). Squares are summed in float32 over at most 1024 elements and the
// partial sums in float64, so that long rows lose no digits; rows whose squares leave float32's
// range are summed again in float64.
template <class T>
inline float inverse_rms(const T* x, int64_t dim, double eps) {
  double sum = 0;
  for (int64_t block = 0; block < dim; block += 1024) {
    const int64_t end = block + 1024 < dim ? block + 1024 : dim;
    Vec acc = zero();
    int64_t i = block;
    for (; i + kLanes <= end; i += kLanes) {
      const Vec v = load(x + i);
      acc = fma(v, v, acc);
    }
    if (i < end) {
      const Vec v = load_tail(x + i, static_cast<int>(end - i));
      acc = fma(v, v, acc);
    }
    sum += reduce_add(acc);
  }
  if (!(sum > 1e-30 && sum < 1e38)) sum = sum_of_squares(x, dim);
  return static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(dim) + eps));
}

// y = x · inv · weight, all in float32, rounded once to T.
template <class T, class Out>
inline void scale_row(const T* x, const NormWeight& weight, float inv, Out* y, int64_t dim) {
  const float* w = weight.data();
  const Vec s = set1(inv);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Vec v = load(x + i) * s;
    store(y + i, w ? v * load(w + i) : v);
  }
  if (i < dim) {
    const int n = static_cast<int>(dim - i);
    const Vec v = load_tail(x + i, n) * s;
    store_tail(y + i, w ? v * load_tail(w + i, n) : v, n);
  }
}

}  // namespace glimmer::GLIMMER_ISA_NS
