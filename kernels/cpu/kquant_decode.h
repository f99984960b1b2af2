// Decodes GGUF weights to float32, bit for bit as the gguf package does: d · scale, · q and
// dmin · min are exact in float32, so at most the final subtraction rounds.
#pragma once

#include <algorithm>

#include "glimmer/kquant.h"
#include "glimmer/simd.h"

namespace glimmer::GLIMMER_ISA_NS {

struct SubBlock {
  float scale, min;
};

template <class Block>
inline SubBlock sub_block(const Block& b, const SubScales& s, int i) {
  return {half_at(b.d) * static_cast<float>(byte_of(s.scales, i)),
          half_at(b.dmin) * static_cast<float>(byte_of(s.mins, i))};
}

inline void decode(const BlockQ4K& b, float* w) {
  const SubScales s = unpack_scales(b.scales);
  for (int p = 0; p < 4; ++p) {
    const SubBlock low = sub_block(b, s, 2 * p), high = sub_block(b, s, 2 * p + 1);
    const uint8_t* q = b.qs + 32 * p;
    float* out = w + 64 * p;
    for (int l = 0; l < 32; ++l) out[l] = low.scale * static_cast<float>(q[l] & 15) - low.min;
    for (int l = 0; l < 32; ++l)
      out[32 + l] = high.scale * static_cast<float>(q[l] >> 4) - high.min;
  }
}

inline void decode(const BlockQ5K& b, float* w) {
  const SubScales s = unpack_scales(b.scales);
  for (int g = 0; g < 8; ++g) {
    const SubBlock sub = sub_block(b, s, g);
    const uint8_t* q = b.qs + 32 * (g / 2);
    const int shift = 4 * (g & 1);
    float* out = w + 32 * g;
    for (int l = 0; l < 32; ++l) {
      const int v = ((q[l] >> shift) & 15) | (((b.qh[l] >> g) & 1) << 4);
      out[l] = sub.scale * static_cast<float>(v) - sub.min;
    }
  }
}

inline void decode(const BlockQ6K& b, float* w) {
  const float d = half_at(b.d);
  for (int g = 0; g < 8; ++g) {  // 32 weights, two sub-blocks
    const int half = g / 4, quarter = g % 4;
    const uint8_t* ql = b.ql + 64 * half + 32 * (quarter & 1);
    const uint8_t* qh = b.qh + 32 * half;
    const int low_shift = quarter & 2 ? 4 : 0;
    float* out = w + 32 * g;
    for (int s = 0; s < 2; ++s) {
      const float scale = d * static_cast<float>(b.scales[2 * g + s]);
      for (int l = 16 * s; l < 16 * s + 16; ++l) {
        const int v = ((ql[l] >> low_shift) & 15) | (((qh[l] >> (2 * quarter)) & 3) << 4);
        out[l] = scale * static_cast<float>(v - 32);
      }
    }
  }
}

inline void decode(const BlockQ80& b, float* w) {
  const float d = half_at(b.d);
  for (int l = 0; l < 32; ++l) w[l] = d * static_cast<float>(b.qs[l]);
}

template <class Block>
inline void decode_blocks(const uint8_t* p, int64_t count, float* w) {
  constexpr int64_t size = std::is_same_v<Block, BlockQ80> ? 32 : kSuperBlock;
  for (int64_t i = 0; i * size < count; ++i)
    decode(*reinterpret_cast<const Block*>(p + i * static_cast<int64_t>(sizeof(Block))),
           w + i * size);
}

template <class T>
inline void widen(const uint8_t* p, int64_t count, float* w) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    w[i] = to_float(value);
  }
}

// F16C and its kin for whole vectors; bytes may have any alignment.
inline void widen_f16(const uint8_t* p, int64_t count, float* w) {
  int64_t i = 0;
  for (; kLanes > 1 && i + kLanes <= count; i += kLanes)
    store(w + i, load(reinterpret_cast<const f16*>(p + 2 * i)));
  widen<f16>(p + 2 * i, count - i, w + i);
}

using DecodeFn = void (*)(const uint8_t* p, int64_t count, float* w);

// Decodes `count` weights, a whole number of blocks, from p to w.
inline DecodeFn decoder(QType q) {
  switch (q) {
    case QType::Q4_K:
      return decode_blocks<BlockQ4K>;
    case QType::Q5_K:
      return decode_blocks<BlockQ5K>;
    case QType::Q6_K:
      return decode_blocks<BlockQ6K>;
    case QType::Q8_0:
      return decode_blocks<BlockQ80>;
    case QType::F16:
      return widen_f16;
    case QType::BF16:
      return widen<bf16>;
    default:
      return widen<float>;
  }
}

}  // namespace glimmer::GLIMMER_ISA_NS
