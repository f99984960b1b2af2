// Integer dot products of quantised weights with int8 activations.
//
// Activations are quantised in groups of 32 with scale = max|x| / 127. For each group of 32 weights
// (16 for Q6_K) the integer dot product is exact in int32; scales and mins are then applied in
// float32. An output element is a chain of such steps in the order of k, spread over lanes whose
// number depends on the ISA only: its bits do not depend on the number or place of rows.
//
// Each ISA's header defines, for a weight type Q, IntPath<Q>:
//   Weight  a decoded unit of kBlocks super-blocks      decode(row, k, unit) -> Weight
//   Acts    the same unit of a row of activations       put(block, group, ActGroup)
//   Acc     the lanes of one output element             dot(Weight, Acts, Acc&), finish(Acc)
#pragma once

#include "glimmer/kquant.h"
#include "glimmer/simd.h"

// For the steps of an inner loop: a call would push every vector through memory.
#define GLIMMER_INLINE __attribute__((always_inline)) inline

namespace glimmer::GLIMMER_ISA_NS {

constexpr int kGroup = 32;
constexpr int kGroups = 8;  // in a super-block

constexpr bool has_min(QType q) {
  return q == QType::Q4_K || q == QType::Q5_K;
}

struct ActGroup {
  int8_t q[kGroup];
  float scale;
  int32_t sum[2];  // of each half
};

// Groups whose largest magnitude is below this count as zero: 127 / max would overflow.
constexpr float kTinyActivation = 1e-36f;

// A group with a NaN or an infinity gets the scale NaN, which makes the whole output row NaN.
inline ActGroup quantize_group(const float* x) {
  ActGroup g;
  int32_t max_bits = 0;
  for (int i = 0; i < kGroup; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    max_bits = magnitude > max_bits ? magnitude : max_bits;
  }
  const bool finite = max_bits < 0x7f800000;
  const float max = finite ? float_of(static_cast<uint32_t>(max_bits)) : 0.0f;
  const float inverse = max < kTinyActivation ? 0.0f : 127.0f / max;
  g.scale = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0.0f : max / 127.0f;
  for (int i = 0; i < kGroup; ++i) {
    // Adding 1.5 · 2^23 rounds to the nearest even integer and leaves it in the low bits.
    const float rounded = (finite ? x[i] : 0.0f) * inverse + 12582912.0f;
    g.q[i] = static_cast<int8_t>(static_cast<int32_t>(bits_of(rounded)) - 0x4b400000);
  }
  for (int h = 0; h < 2; ++h) {
    g.sum[h] = 0;
    for (int i = 0; i < 16; ++i) g.sum[h] += g.q[16 * h + i];
  }
  return g;
}

// A row's super-block, or zeros past its end (which decode to zero weights in every type).
GLIMMER_INLINE const uint8_t* block_or_zero(const uint8_t* row, int64_t index, int64_t count,
                                            int64_t bytes) {
  alignas(64) static const uint8_t zero[sizeof(BlockQ80) * kGroups] = {};
  return index < count ? row + index * bytes : zero;
}

// The eight Q8_0 blocks of a super-block; a partial one at the end of a row is padded into `pad`.
GLIMMER_INLINE const BlockQ80* q80_blocks(const uint8_t* row, int64_t k, int64_t super_block,
                                          BlockQ80 (&pad)[kGroups]) {
  const int64_t first = super_block * kGroups, count = k / kGroup - first;
  const uint8_t* p = row + first * static_cast<int64_t>(sizeof(BlockQ80));
  if (count >= kGroups) return reinterpret_cast<const BlockQ80*>(p);
  std::memset(pad, 0, sizeof(pad));
  if (count > 0) std::memcpy(pad, p, static_cast<size_t>(count) * sizeof(BlockQ80));
  return pad;
}

}  // namespace glimmer::GLIMMER_ISA_NS

#if defined(GLIMMER_ISA_AVX512)
#include "kquant_int8_avx512.h"
#elif defined(GLIMMER_ISA_AVX2)
#include "kquant_int8_avx2.h"
#else
#include "kquant_int8_scalar.h"
#endif
