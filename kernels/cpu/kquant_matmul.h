// x · Wᵀ in float32 for encoded weights, by blocks of weight rows: what kquant_linear,
// kquant_swiglu and kquant_logits share. Each op adds its own epilogue to a block's results.
#pragma once

#include <algorithm>

#include "glimmer/kquant.h"
#include "glimmer/scratch.h"
#include "glimmer/simd.h"

namespace glimmer::GLIMMER_ISA_NS {

// How activations are laid out for a weight type.
enum class ActLayout : uint8_t { Float, Min, Q6, Q8 };

// Rows of x, prepared once for all weight rows: float32 (exact path and float weights) or int8.
struct Activations {
  ActLayout layout = ActLayout::Float;
  int64_t rows = 0;
  int64_t units = 0;  // a row is this many units of the layout
  const void* data = nullptr;
};

ActLayout act_layout(QType q, bool exact);

// Rows [begin, end) of x [M, K]. The result lives in `scratch`, or in x where it can be used as is.
Activations prepare_activations(const Context& ctx, const Tensor& x, int64_t begin, int64_t end,
                                QType q, Scratch& scratch);

// y[m · y_stride + n - begin] = Σ_k x[m, k] · w[n, k] for n in [begin, end) and every row m of x.
void matmul_rows(const Activations& x, const QMatrix& w, int64_t begin, int64_t end, float* y,
                 int64_t y_stride);

// Rows of x that are handled together, so that prepared activations and results stay bounded.
constexpr int64_t kMaxRows = 1024;

// Weight rows a block: long streams where weights come from memory, cache-sized results else.
inline int64_t rows_per_block(int64_t m) {
  return m <= 4 ? 256 : 64;
}

// Calls body(begin, end) on blocks of the n weight rows, in parallel.
template <class F>
void for_weight_blocks(const Context& ctx, int64_t n, int64_t k, int64_t m, F&& body) {
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, k * m));
  ctx.parallel(n, grain, [&](int64_t begin, int64_t end) {
    const int64_t step = rows_per_block(m);
    for (int64_t b = begin; b < end; b += step) body(b, std::min(b + step, end));
  });
}

// Calls body(begin, end) on ranges of at most kMaxRows rows of x.
template <class F>
void for_row_ranges(int64_t m, F&& body) {
  for (int64_t b = 0; b < m; b += kMaxRows) body(b, std::min(b + kMaxRows, m));
}

// out[i] = f(in[i]...) for n elements, rounded once to T.
template <class T, class F>
inline void map_row(T* out, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, f([i](const float* p) { return load(p + i); }));
  if (i < n) {
    const int tail = static_cast<int>(n - i);
    store_tail(out + i, f([i, tail](const float* p) { return load_tail(p + i, tail); }), tail);
  }
}

}  // namespace glimmer::GLIMMER_ISA_NS
