// AVX-512 VNNI integer dot products: vpdpbusd on unsigned weights, 64 a vector.
//
// A super-block is kept as the first halves (16 values) of the even groups 0, 2, 4, 6 in one
// vector, their second halves in the next, then the same of the odd groups: 128-bit lanes that come
// straight from nibble bytes. Accumulating both halves leaves four partial sums a group; unpacking
// even with odd, and two super-blocks (or, for Q6_K, both halves) with each other, adds them into
// sixteen lanes that each hold one group's exact sum.
#pragma once

namespace glimmer::GLIMMER_ISA_NS {

GLIMMER_INLINE __m512i load512(const void* p) {
  return _mm512_loadu_si512(p);
}
GLIMMER_INLINE __m512i add_unpacked32(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
GLIMMER_INLINE __m512i add_unpacked64(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
// 64-bit lanes of two alternating amounts, one per 128-bit lane.
GLIMMER_INLINE __m512i alternate(int64_t even, int64_t odd) {
  return _mm512_set_epi64(odd, odd, even, even, odd, odd, even, even);
}
// n | (bits & mask)
GLIMMER_INLINE __m512i or_masked(__m512i n, __m512i bits, __m512i mask) {
  return _mm512_ternarylogic_epi32(n, bits, mask, 0xF8);
}

template <QType Q>
struct IntPath {
  static constexpr int kBlocks = Q == QType::Q6_K ? 1 : 2;
  static constexpr int kVectors = 4 * kBlocks;

  struct Weight {
    __m512i q[kVectors];  // [super-block][odd][half]
    __m512 scale;
    __m512 min;
  };
  struct alignas(64) Acts {
    int8_t q[kSuperBlock * kBlocks];
    float scale[16];
    union {
      float sum[16];       // Q4_K, Q5_K: scale · Σq
      int32_t offset[16];  // Q6_K, Q8_0: Σq times what their weights are shifted by
    };

    void put(int block, int group, const ActGroup& a) {
      int8_t* to = q + kSuperBlock * block + 128 * (group & 1) + 16 * (group / 2);
      std::memcpy(to, a.q, 16);
      std::memcpy(to + 64, a.q + 16, 16);
      const int lane = 4 * (group / 2) + (group & 1);
      if constexpr (Q == QType::Q6_K) {
        for (int half = 0; half < 2; ++half) {
          scale[lane + 2 * half] = a.scale;
          offset[lane + 2 * half] = 32 * a.sum[half];
        }
      } else {
        const int32_t total = a.sum[0] + a.sum[1];
        scale[lane + 2 * block] = a.scale;
        if constexpr (has_min(Q))
          sum[lane + 2 * block] = a.scale * static_cast<float>(total);
        else
          offset[lane + 2 * block] = 128 * total;
      }
    }
  };
  struct Acc {
    __m512 v = _mm512_setzero_ps();
  };

  GLIMMER_INLINE static Weight decode(const uint8_t* row, int64_t k, int64_t unit) {
    Weight w;
    const int64_t count = k / kSuperBlock, bytes = info(Q).bytes;
    if constexpr (Q == QType::Q8_0) {
      BlockQ80 pad[2][kGroups];
      unpack_q80(q80_blocks(row, k, 2 * unit, pad[0]), q80_blocks(row, k, 2 * unit + 1, pad[1]), w);
    } else if constexpr (Q == QType::Q6_K) {
      unpack_q6(*reinterpret_cast<const BlockQ6K*>(row + unit * bytes), w);
    } else {
      unpack_q45(row + 2 * unit * bytes, block_or_zero(row, 2 * unit + 1, count, bytes), w);
    }
    return w;
  }

  GLIMMER_INLINE static void dot(const Weight& w, const Acts& a, Acc& acc) {
    const __m512 scale = _mm512_load_ps(a.scale);
    __m512i sum;
    if constexpr (Q == QType::Q6_K) {
      sum = add_unpacked64(add_unpacked32(mul(w, a, 0), mul(w, a, 2)),
                           add_unpacked32(mul(w, a, 1), mul(w, a, 3)));
    } else {
      sum = add_unpacked64(add_unpacked32(mul_halves(w, a, 0), mul_halves(w, a, 2)),
                           add_unpacked32(mul_halves(w, a, 4), mul_halves(w, a, 6)));
    }
    if constexpr (!has_min(Q)) sum = _mm512_sub_epi32(sum, load512(a.offset));
    acc.v = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), w.scale), scale, acc.v);
    if constexpr (has_min(Q)) acc.v = _mm512_fnmadd_ps(w.min, _mm512_load_ps(a.sum), acc.v);
  }

  GLIMMER_INLINE static float finish(const Acc& acc) { return reduce_add(Vec{acc.v}); }

 private:
  GLIMMER_INLINE static __m512i mul(const Weight& w, const Acts& a, int i) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[i], load512(a.q + 64 * i));
  }
  GLIMMER_INLINE static __m512i mul_halves(const Weight& w, const Acts& a, int i) {
    return _mm512_dpbusd_epi32(mul(w, a, i), w.q[i + 1], load512(a.q + 64 * (i + 1)));
  }

  // Two times eight bytes in group order as floats in lane order.
  GLIMMER_INLINE static __m512 lanes_of(uint64_t first, uint64_t second) {
    const __m128i bytes = _mm_unpacklo_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(first)),
                                             _mm_cvtsi64_si128(static_cast<int64_t>(second)));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  }

  GLIMMER_INLINE static void unpack_q45(const uint8_t* first, const uint8_t* second, Weight& w) {
    using Block = std::conditional_t<Q == QType::Q4_K, BlockQ4K, BlockQ5K>;
    const auto& b0 = *reinterpret_cast<const Block*>(first);
    const auto& b1 = *reinterpret_cast<const Block*>(second);
    unpack_values(b0, w.q);
    unpack_values(b1, w.q + 4);
    const SubScales s0 = unpack_scales(b0.scales), s1 = unpack_scales(b1.scales);
    uint32_t d0, d1;  // d and dmin
    std::memcpy(&d0, b0.d, 4);
    std::memcpy(&d1, b1.d, 4);
    const __m128i halves =
        _mm_cvtsi64_si128(static_cast<int64_t>(d0 | (static_cast<uint64_t>(d1) << 32)));
    const __m512 d = _mm512_broadcast_f32x4(_mm_cvtph_ps(halves));
    w.scale = _mm512_mul_ps(lanes_of(s0.scales, s1.scales), _mm512_permute_ps(d, 0xA0));
    w.min = _mm512_mul_ps(lanes_of(s0.mins, s1.mins), _mm512_permute_ps(d, 0xF5));
  }

  template <class Block>
  GLIMMER_INLINE static void unpack_values(const Block& b, __m512i* q) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i low = load512(b.qs), high = load512(b.qs + 64);
    for (int half = 0; half < 2; ++half) {
      const __m512i bytes =
          half ? _mm512_shuffle_i32x4(low, high, 0xDD) : _mm512_shuffle_i32x4(low, high, 0x88);
      q[half] = _mm512_and_si512(bytes, nibble);
      q[2 + half] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
      if constexpr (Q == QType::Q5_K) {
        // Bit 2p of a byte is the fifth bit of group 2p, in 128-bit lane p; the next of group 2p+1.
        const __m512i shift = _mm512_set_epi64(30, 30, 0, 0, 2, 2, 4, 4);
        const __m512i fifth = _mm512_set1_epi8(16);
        const __m512i bits = _mm512_broadcast_i32x4(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.qh + 16 * half)));
        const __m512i even = rotate_left(bits, shift);
        q[half] = or_masked(q[half], even, fifth);
        q[2 + half] = or_masked(q[2 + half], _mm512_srli_epi16(even, 1), fifth);
      }
    }
  }

  // Rotates 32-bit elements; `amount` holds one for each 64-bit element.
  GLIMMER_INLINE static __m512i rotate_left(__m512i v, __m512i amount) {
    return _mm512_rolv_epi32(v, _mm512_or_si512(amount, _mm512_slli_epi64(amount, 32)));
  }

  GLIMMER_INLINE static void unpack_q6(const BlockQ6K& b, Weight& w) {
    // 128-bit lanes of `low` and `high`: halves of bytes A, B of the first and second 128 weights,
    // where nibbles of A are the even groups and of B the odd ones; lanes of `top`: halves of qh.
    const __m512i nibble = _mm512_set1_epi8(15), mask = _mm512_set1_epi8(0x30);
    const __m512i low = load512(b.ql), high = load512(b.ql + 64), top = load512(b.qh);
    const __m512i values[4] = {
        _mm512_shuffle_i32x4(low, high, 0x00), _mm512_shuffle_i32x4(low, high, 0x55),
        _mm512_shuffle_i32x4(low, high, 0xAA), _mm512_shuffle_i32x4(low, high, 0xFF)};
    const __m512i tops[2] = {_mm512_shuffle_i32x4(top, top, 0xA0),
                             _mm512_shuffle_i32x4(top, top, 0xF5)};
    for (int odd = 0; odd < 2; ++odd) {
      // Quarters 0 and 2 of a half have bits 0-1 and 4-5 of qh, quarters 1 and 3 bits 2-3 and 6-7.
      const __m512i shift = odd ? alternate(2, 30) : alternate(4, 0);
      for (int half = 0; half < 2; ++half) {
        const __m512i n =
            _mm512_and_si512(_mm512_srlv_epi64(values[2 * odd + half], alternate(0, 4)), nibble);
        w.q[2 * odd + half] = or_masked(n, rotate_left(tops[half], shift), mask);
      }
    }
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i scales =
        _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b.scales)), order);
    uint16_t d;
    std::memcpy(&d, b.d, 2);
    w.scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)),
                            _mm512_set1_ps(_cvtsh_ss(d)));
  }

  GLIMMER_INLINE static __m512i gather(const BlockQ80* b, int odd, int half) {
    const auto part = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b[i + odd].qs + 16 * half));
    };
    __m512i v = _mm512_castsi128_si512(part(0));
    v = _mm512_inserti32x4(v, part(2), 1);
    v = _mm512_inserti32x4(v, part(4), 2);
    return _mm512_inserti32x4(v, part(6), 3);
  }

  GLIMMER_INLINE static void unpack_q80(const BlockQ80* first, const BlockQ80* second, Weight& w) {
    const __m512i sign = _mm512_set1_epi8(-128);  // q + 128 is unsigned
    alignas(32) uint16_t d[16];
    for (int block = 0; block < 2; ++block) {
      const BlockQ80* b = block ? second : first;
      for (int i = 0; i < 4; ++i)
        w.q[4 * block + i] = _mm512_xor_si512(gather(b, i / 2, i % 2), sign);
      for (int g = 0; g < kGroups; ++g)
        std::memcpy(d + 4 * (g / 2) + 2 * block + (g & 1), b[g].d, 2);
    }
    w.scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(d)));
  }
};

}  // namespace glimmer::GLIMMER_ISA_NS
