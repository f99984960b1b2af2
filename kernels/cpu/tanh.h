// Hyperbolic tangent of a float vector.
#pragma once

#include "glimmer/simd.h"

namespace glimmer::GLIMMER_ISA_NS {

// tanh x with a relative error of about 2e-7; ±1 from |x| = 10 on; NaN stays NaN.
// Below 0.4 the Taylor series to x^13, whose next term is below 4e-9 relative; above it
// (1 - e) / (1 + e) with e = exp(-2|x|), which cancels no more than one bit there.
inline Vec tanh(Vec x) {
  const Vec c = max(min(x, set1(10.0f)), set1(-10.0f)), a = abs(c), x2 = c * c;
  Vec p = set1(21844.0f / 6081075);
  for (float k : {-1382.0f / 155925, 62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3})
    p = fma(p, x2, set1(k));
  const Vec small = fma(p * x2, c, c);
  const Vec e = exp(set1(-2.0f) * a);
  const Vec large = (set1(1.0f) - e) / (set1(1.0f) + e) * (c / a);
  return keep_nan(x, where_less(a, set1(0.4f), small, large));
}

}  // namespace glimmer::GLIMMER_ISA_NS
