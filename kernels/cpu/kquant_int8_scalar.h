// Portable integer dot products; int16 operands, which compilers turn into multiply-add pairs.
#pragma once

namespace glimmer::GLIMMER_ISA_NS {

template <QType Q>
struct IntPath {
  static constexpr int kBlocks = 1;
  static constexpr int kSubs = Q == QType::Q6_K ? 16 : 8;
  static constexpr int kSubSize = static_cast<int>(kSuperBlock) / kSubs;

  struct Weight {
    int16_t q[kSuperBlock];
    float scale[kSubs];
    float min[kGroups];
  };
  struct Acts {
    int16_t q[kSuperBlock];
    float scale[kGroups];
    float sum[kGroups];

    void put(int, int group, const ActGroup& a) {
      for (int i = 0; i < kGroup; ++i) q[kGroup * group + i] = a.q[i];
      scale[group] = a.scale;
      sum[group] = a.scale * static_cast<float>(a.sum[0] + a.sum[1]);
    }
  };
  struct Acc {
    float lane[kGroups] = {};
  };

  static Weight decode(const uint8_t* row, int64_t k, int64_t unit) {
    Weight w;
    if constexpr (Q == QType::Q8_0) {
      BlockQ80 pad[kGroups];
      const BlockQ80* b = q80_blocks(row, k, unit, pad);
      for (int g = 0; g < kGroups; ++g) {
        for (int l = 0; l < kGroup; ++l) w.q[kGroup * g + l] = b[g].qs[l];
        w.scale[g] = half_at(b[g].d);
      }
    } else {
      unpack(row + unit * info(Q).bytes, w);
    }
    return w;
  }

  static void dot(const Weight& w, const Acts& a, Acc& acc) {
    for (int s = 0; s < kSubs; ++s) {
      int32_t sum = 0;
      for (int i = kSubSize * s; i < kSubSize * (s + 1); ++i)
        sum += static_cast<int32_t>(w.q[i]) * static_cast<int32_t>(a.q[i]);
      const int g = s * kSubSize / kGroup;
      acc.lane[g] += static_cast<float>(sum) * w.scale[s] * a.scale[g];
    }
    if constexpr (has_min(Q))
      for (int g = 0; g < kGroups; ++g) acc.lane[g] -= w.min[g] * a.sum[g];
  }

  static float finish(const Acc& acc) {
    const float* v = acc.lane;
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }

 private:
  static void unpack(const uint8_t* p, Weight& w) {
    if constexpr (Q == QType::Q6_K) {
      const auto& b = *reinterpret_cast<const BlockQ6K*>(p);
      for (int g = 0; g < kGroups; ++g) {
        const uint8_t* ql = b.ql + 64 * (g / 4) + 32 * (g & 1);
        const uint8_t* qh = b.qh + 32 * (g / 4);
        const int low = g & 2 ? 4 : 0, high = 2 * (g & 3);
        for (int l = 0; l < kGroup; ++l)
          w.q[kGroup * g + l] =
              static_cast<int16_t>((((ql[l] >> low) & 15) | (((qh[l] >> high) & 3) << 4)) - 32);
      }
      const float d = half_at(b.d);
      for (int s = 0; s < kSubs; ++s) w.scale[s] = d * static_cast<float>(b.scales[s]);
    } else {
      using Block = std::conditional_t<Q == QType::Q4_K, BlockQ4K, BlockQ5K>;
      const auto& b = *reinterpret_cast<const Block*>(p);
      const SubScales subs = unpack_scales(b.scales);
      const float d = half_at(b.d), dmin = half_at(b.dmin);
      for (int g = 0; g < kGroups; ++g) {
        const uint8_t* q = b.qs + 32 * (g / 2);
        const int shift = 4 * (g & 1);
        for (int l = 0; l < kGroup; ++l) {
          int v = (q[l] >> shift) & 15;
          if constexpr (Q == QType::Q5_K) v |= ((b.qh[l] >> g) & 1) << 4;
          w.q[kGroup * g + l] = static_cast<int16_t>(v);
        }
        w.scale[g] = d * static_cast<float>(byte_of(subs.scales, g));
        w.min[g] = dmin * static_cast<float>(byte_of(subs.mins, g));
      }
    }
  }
};

}  // namespace glimmer::GLIMMER_ISA_NS
