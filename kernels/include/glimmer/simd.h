// A float vector of the translation unit's ISA: 1 lane (scalar), 8 (AVX2) or 16 (AVX-512).
// Everything is in the ISA's own namespace, so that the copies cannot be mixed up at link time.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "glimmer/half.h"
#include "glimmer/op.h"

#if defined(GLIMMER_ISA_AVX512) || defined(GLIMMER_ISA_AVX2)
#include <immintrin.h>
#endif

namespace glimmer::GLIMMER_ISA_NS {

#if defined(GLIMMER_ISA_AVX512)

constexpr int kLanes = 16;
struct Vec {
  __m512 v;
};
inline Vec set1(float x) {
  return {_mm512_set1_ps(x)};
}
inline Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline Vec load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.v);
}
inline void store(f16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, Vec a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __m512i r = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
inline Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
  return {_mm512_abs_ps(a.v)};
}
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n
inline Vec scale2(Vec a, Vec n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
inline float reduce_add(Vec a) {
  return _mm512_reduce_add_ps(a.v);
}
inline float reduce_max(Vec a) {
  return _mm512_reduce_max_ps(a.v);
}
// Where a < b take x, else y.
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
// Where x is NaN take x, else y.
inline Vec keep_nan(Vec x, Vec y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v)};
}

#elif defined(GLIMMER_ISA_AVX2)

constexpr int kLanes = 8;
struct Vec {
  __m256 v;
};
inline Vec set1(float x) {
  return {_mm256_set1_ps(x)};
}
inline Vec load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
inline Vec load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load(const bf16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.v);
}
inline void store(f16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, Vec a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i r = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i lo = _mm256_castsi256_si128(r), hi = _mm256_extracti128_si256(r, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(lo, hi));
}
inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.v, b.v)};
}
inline Vec abs(Vec a) {
  return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)};
}
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec scale2(Vec a, Vec n) {
  const __m256i e =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(e))};
}
inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec keep_nan(Vec x, Vec y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q))};
}

#else

constexpr int kLanes = 1;
struct Vec {
  float v;
};
inline Vec set1(float x) {
  return {x};
}
template <class T>
inline Vec load(const T* p) {
  return {to_float(*p)};
}
template <class T>
inline void store(T* p, Vec a) {
  *p = from_float<T>(a.v);
}
inline Vec operator+(Vec a, Vec b) {
  return {a.v + b.v};
}
inline Vec operator-(Vec a, Vec b) {
  return {a.v - b.v};
}
inline Vec operator*(Vec a, Vec b) {
  return {a.v * b.v};
}
inline Vec operator/(Vec a, Vec b) {
  return {a.v / b.v};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {a.v * b.v + c.v};
}
inline Vec max(Vec a, Vec b) {
  return {a.v > b.v ? a.v : b.v};
}
inline Vec min(Vec a, Vec b) {
  return {a.v < b.v ? a.v : b.v};
}
inline Vec abs(Vec a) {
  return {std::fabs(a.v)};
}
inline Vec round(Vec a) {
  return {std::nearbyint(a.v)};
}
inline Vec scale2(Vec a, Vec n) {
  return {std::ldexp(a.v, static_cast<int>(n.v))};
}
inline float reduce_add(Vec a) {
  return a.v;
}
inline float reduce_max(Vec a) {
  return a.v;
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
  return a.v < b.v ? x : y;
}
inline Vec keep_nan(Vec x, Vec y) {
  return std::isnan(x.v) ? x : y;
}

#endif

inline Vec zero() {
  return set1(0.0f);
}

// e^x with a relative error below 2 ulp for x in [-87.3, 88.3], 0 below, infinity above; NaN stays.
// Range reduction x = n·ln2 + r, |r| ≤ ln2/2 (Cody and Waite), then a degree-7 Taylor polynomial.
inline Vec exp(Vec x) {
  const Vec c = min(max(x, set1(-87.3f)), set1(88.3f));
  const Vec n = round(c * set1(1.44269504088896341f));
  Vec r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.0f / 5040);
  for (float k : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = fma(p, r, set1(k));
  const Vec limited = where_less(x, set1(-87.3f), zero(), scale2(p, n));
  const Vec infinity = set1(std::numeric_limits<float>::infinity());
  return keep_nan(x, where_less(set1(88.3f), x, infinity, limited));
}

inline Vec sigmoid(Vec x) {
  return set1(1.0f) / (set1(1.0f) + exp(zero() - x));
}
inline Vec silu(Vec x) {
  return x * sigmoid(x);
}

// A tail of n < kLanes elements goes through a padded buffer and the same arithmetic, so that a
// value's bits do not depend on its place in the row.
template <class T>
inline Vec load_tail(const T* p, int n) {
  T buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
inline void store_tail(T* p, Vec a, int n) {
  T buffer[kLanes];
  store(buffer, a);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

// Calls f with a value of the C++ storage type of a float dtype.
template <class F>
inline void with_float_type(DType t, F&& f) {
  if (t == DType::F32)
    f(float{});
  else if (t == DType::F16)
    f(f16{});
  else
    f(bf16{});
}

}  // namespace glimmer::GLIMMER_ISA_NS
