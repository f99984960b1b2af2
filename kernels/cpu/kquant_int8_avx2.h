// AVX2 integer dot products: vpmaddubsw on unsigned weights, eight lanes a super-block.
//
// A super-block is kept as the first halves (16 values) of the even groups 0, 2, 4, 6, their second
// halves, then the same of the odd groups: 128-bit lanes that come straight from nibble bytes, and
// whose partial sums three horizontal additions bring into one lane a group.
#pragma once

namespace glimmer::GLIMMER_ISA_NS {

GLIMMER_INLINE __m256i load256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
GLIMMER_INLINE __m256i load_pair(const void* low, const void* high) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(low))),
      _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}
GLIMMER_INLINE float half_to_float(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}

// The lane that group g ends in, after the horizontal additions.
constexpr int kLaneOfGroup[kGroups] = {0, 1, 4, 5, 2, 3, 6, 7};
constexpr int kHalves = 2;

template <QType Q>
struct IntPath {
  static constexpr int kBlocks = 1;
  // Q6_K has a scale for each half of a group.
  static constexpr int kSets = Q == QType::Q6_K ? 2 : 1;

  struct Weight {
    __m256i q[8];  // [odd][half][pair of lanes]
    __m256 scale[kSets];
    __m256 min;
  };
  struct alignas(32) Acts {
    int8_t q[kSuperBlock];
    float scale[8];
    float sum[8];                // Q4_K, Q5_K: scale · Σq
    int32_t offset[kHalves][8];  // Q6_K: 32 · Σq of each half

    void put(int, int group, const ActGroup& a) {
      for (int h = 0; h < kHalves; ++h)
        std::memcpy(q + 128 * (group & 1) + 64 * h + 16 * (group / 2), a.q + 16 * h, 16);
      const int lane = kLaneOfGroup[group];
      scale[lane] = a.scale;
      sum[lane] = a.scale * static_cast<float>(a.sum[0] + a.sum[1]);
      for (int h = 0; h < kHalves; ++h) offset[h][lane] = 32 * a.sum[h];
    }
  };
  struct Acc {
    __m256 v = _mm256_setzero_ps();
  };

  GLIMMER_INLINE static Weight decode(const uint8_t* row, int64_t k, int64_t unit) {
    Weight w;
    if constexpr (Q == QType::Q8_0) {
      BlockQ80 pad[kGroups];
      unpack_q80(q80_blocks(row, k, unit, pad), w);
    } else if constexpr (Q == QType::Q6_K) {
      unpack_q6(*reinterpret_cast<const BlockQ6K*>(row + unit * info(Q).bytes), w);
    } else {
      unpack_q45(row + unit * info(Q).bytes, w);
    }
    return w;
  }

  GLIMMER_INLINE static void dot(const Weight& w, const Acts& a, Acc& acc) {
    const __m256 scale = _mm256_loadu_ps(a.scale);
    if constexpr (Q == QType::Q6_K) {
      for (int h = 0; h < kHalves; ++h) {
        const __m256i sum = _mm256_sub_epi32(group_sums<1>(w, a, h), load256(a.offset[h]));
        acc.v = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), w.scale[h]), scale, acc.v);
      }
    } else {
      const __m256 sum = _mm256_cvtepi32_ps(group_sums<kHalves>(w, a, 0));
      acc.v = _mm256_fmadd_ps(_mm256_mul_ps(sum, w.scale[0]), scale, acc.v);
      if constexpr (has_min(Q)) acc.v = _mm256_fnmadd_ps(w.min, _mm256_loadu_ps(a.sum), acc.v);
    }
  }

  GLIMMER_INLINE static float finish(const Acc& acc) { return reduce_add(Vec{acc.v}); }

 private:
  // Σ w · a of 32 bytes as eight int32, over `Count` halves from `first`. No int16 saturates: two
  // halves of 5-bit weights reach 4 · 31 · 127, one of 6-bit ones 2 · 63 · 127.
  template <int Count>
  GLIMMER_INLINE static __m256i partial(const Weight& w, const Acts& a, int odd, int first,
                                        int pair) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int i = 4 * odd + 2 * first + pair;
    const __m256i products = product(w.q[i], load256(a.q + 32 * i));
    if constexpr (Count == 1) return _mm256_madd_epi16(products, ones);
    const __m256i more = product(w.q[i + 2], load256(a.q + 32 * (i + 2)));
    if constexpr (Q == QType::Q8_0)  // 2 · 128 · 127 fits int16 once, not twice
      return _mm256_add_epi32(_mm256_madd_epi16(products, ones), _mm256_madd_epi16(more, ones));
    return _mm256_madd_epi16(_mm256_add_epi16(products, more), ones);
  }

  GLIMMER_INLINE static __m256i product(__m256i w, __m256i a) {
    if constexpr (Q == QType::Q8_0)  // signed weights: move the sign to the activation
      return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
    return _mm256_maddubs_epi16(w, a);
  }

  template <int Count>
  GLIMMER_INLINE static __m256i group_sums(const Weight& w, const Acts& a, int first) {
    const __m256i low =
        _mm256_hadd_epi32(partial<Count>(w, a, 0, first, 0), partial<Count>(w, a, 1, first, 0));
    const __m256i high =
        _mm256_hadd_epi32(partial<Count>(w, a, 0, first, 1), partial<Count>(w, a, 1, first, 1));
    return _mm256_hadd_epi32(low, high);
  }

  // Eight bytes, in group order, as floats in lane order.
  GLIMMER_INLINE static __m256 lanes_of(uint64_t bytes) {
    const __m128i order = _mm_set_epi64x(0, 0x0706030205040100);
    const __m128i b = _mm_shuffle_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)), order);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b));
  }

  GLIMMER_INLINE static void unpack_q45(const uint8_t* p, Weight& w) {
    using Block = std::conditional_t<Q == QType::Q4_K, BlockQ4K, BlockQ5K>;
    const auto& b = *reinterpret_cast<const Block*>(p);
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int half = 0; half < kHalves; ++half) {
      for (int pair = 0; pair < 2; ++pair) {
        const uint8_t* q = b.qs + 64 * pair + 16 * half;
        const __m256i bytes = load_pair(q, q + 32);
        __m256i even = _mm256_and_si256(bytes, nibble);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
        if constexpr (Q == QType::Q5_K) {
          // Bit 2(2 pair + lane) of a byte goes to bit 4 of the even group, the next to the odd's.
          const uint8_t* h = b.qh + 16 * half;
          const __m256i shift = _mm256_set_epi64x(4 * pair + 2, 4 * pair + 2, 4 * pair, 4 * pair);
          const __m256i bits = _mm256_srlv_epi64(load_pair(h, h), shift);
          const __m256i fifth = _mm256_set1_epi8(16);
          even = _mm256_or_si256(even, _mm256_and_si256(_mm256_slli_epi16(bits, 4), fifth));
          odd = _mm256_or_si256(odd, _mm256_and_si256(_mm256_slli_epi16(bits, 3), fifth));
        }
        w.q[2 * half + pair] = even;
        w.q[4 + 2 * half + pair] = odd;
      }
    }
    const SubScales subs = unpack_scales(b.scales);
    w.scale[0] = _mm256_mul_ps(lanes_of(subs.scales), _mm256_set1_ps(half_to_float(b.d)));
    w.min = _mm256_mul_ps(lanes_of(subs.mins), _mm256_set1_ps(half_to_float(b.dmin)));
  }

  GLIMMER_INLINE static void unpack_q6(const BlockQ6K& b, Weight& w) {
    // Quarters 0 and 2 of a half of the block are the even groups: low and high nibbles, bits 0-1
    // and 4-5 of qh. Quarters 1 and 3, the odd ones, follow 32 bytes and two bits later.
    const __m256i low_shift = _mm256_set_epi64x(4, 4, 0, 0);
    const __m256i nibble = _mm256_set1_epi8(15), high = _mm256_set1_epi8(0x30);
    for (int odd = 0; odd < 2; ++odd) {
      for (int half = 0; half < kHalves; ++half) {
        for (int pair = 0; pair < 2; ++pair) {
          const uint8_t* ql = b.ql + 64 * pair + 32 * odd + 16 * half;
          const uint8_t* qh = b.qh + 32 * pair + 16 * half;
          const __m256i low =
              _mm256_and_si256(_mm256_srlv_epi64(load_pair(ql, ql), low_shift), nibble);
          const __m256i bits = _mm256_srlv_epi64(load_pair(qh, qh), low_shift);
          const __m256i top = odd ? _mm256_slli_epi16(bits, 2) : _mm256_slli_epi16(bits, 4);
          w.q[4 * odd + 2 * half + pair] = _mm256_or_si256(low, _mm256_and_si256(top, high));
        }
      }
    }
    const __m256 d = _mm256_set1_ps(half_to_float(b.d));
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.scales));
    for (int half = 0; half < kHalves; ++half) {
      const __m128i order =
          half ? _mm_set_epi64x(-1, 0x0f0d07050b090301) : _mm_set_epi64x(-1, 0x0e0c06040a080200);
      const __m256i s = _mm256_cvtepi8_epi32(_mm_shuffle_epi8(scales, order));
      w.scale[half] = _mm256_mul_ps(_mm256_cvtepi32_ps(s), d);
    }
  }

  GLIMMER_INLINE static void unpack_q80(const BlockQ80* b, Weight& w) {
    for (int odd = 0; odd < 2; ++odd)
      for (int half = 0; half < kHalves; ++half)
        for (int pair = 0; pair < 2; ++pair)
          w.q[4 * odd + 2 * half + pair] =
              load_pair(b[4 * pair + odd].qs + 16 * half, b[4 * pair + 2 + odd].qs + 16 * half);
    alignas(32) float scale[8];
    for (int g = 0; g < kGroups; ++g) scale[kLaneOfGroup[g]] = half_to_float(b[g].d);
    w.scale[0] = _mm256_load_ps(scale);
  }
};

}  // namespace glimmer::GLIMMER_ISA_NS
