// IEEE half and bfloat16 as storage: conversions that every ISA shares bit for bit
// (round to nearest even, as F16C and AVX-512 do).
#pragma once

#include <cstdint>
#include <cstring>

namespace glimmer {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float to_float(float x) {
  return x;
}
inline float to_float(bf16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_float(f16 h) {
  const uint32_t sign = (h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 31,
                 mantissa = h.bits & 0x3ff;
  if (exponent == 31)  // a NaN comes out quiet, as from the hardware
    return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0));
  if (exponent) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;  // exact
  return float_of(bits_of(subnormal) | sign);
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ff))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // ≥ 65520
  if (magnitude < 0x38800000u) {  // subnormal or zero: let the FPU round at 2^-24
    const float shifted = float_of(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace glimmer
