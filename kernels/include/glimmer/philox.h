// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3")
// and the Gumbel noise that `sample` draws from it, for every backend.
//
// Token `id` of a row with (seed, step) takes word id mod 4 of the block with
//   key     = (low 32 bits of seed, high 32 bits of seed)
//   counter = (low 32 of id/4, high 32 of id/4, low 32 of step, high 32 of step)
// and, from that word w, u = ((w >> 9) + 1/2) · 2^-23: exact in float32, never 0 or 1.
//
// The floating-point functions use one fixed sequence of float32 operations: compile them without
// contraction to fused multiply-adds, and every backend draws the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace glimmer {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr PhiloxBlock philox4x32_10(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    const uint32_t a_high = static_cast<uint32_t>(a >> 32), b_high = static_cast<uint32_t>(b >> 32);
    counter = {{b_high ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                a_high ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The words of tokens 4·block … 4·block + 3.
constexpr PhiloxBlock sample_words(int64_t seed, int64_t step, int64_t block) {
  const uint64_t s = static_cast<uint64_t>(seed), t = static_cast<uint64_t>(step),
                 i = static_cast<uint64_t>(block);
  return philox4x32_10({{static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                         static_cast<uint32_t>(t), static_cast<uint32_t>(t >> 32)}},
                       static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
}

constexpr float uniform_of(uint32_t word) {
  return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
}

// ln x for finite normal x > 0 within 2 ulp: x = m·2^e with m in [√½, √2), ln m = 2 artanh(s) with
// s = (m - 1)/(m + 1), |s| < 0.172, by its Taylor series.
inline float log_float(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t shifted = bits - 0x3f3504f3u;  // √½
  const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  bits = (shifted & 0x007fffffu) + 0x3f3504f3u;
  float m = 0;
  std::memcpy(&m, &bits, sizeof m);
  const float s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
  const float series = s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
  const float tail = 2.0f * s * series + e * -2.12194440e-4f;
  return e * 0.693359375f + (2.0f * s + tail);  // ln 2 in two parts, the first times e exact
}

// Standard Gumbel noise of a word: -ln(-ln u).
inline float gumbel_of(uint32_t word) {
  return -log_float(-log_float(uniform_of(word)));
}

// No noise is larger: -ln(-ln(1 - 2^-24)) = 16.64.
constexpr float kMaxGumbel = 16.7f;

}  // namespace glimmer
