// The probes' loops for one ISA. Vector extensions of the compiler give each its own width.
#include "loops.h"

#if defined(GLIMMER_ISA_AVX512) || defined(GLIMMER_ISA_AVX2)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace glimmer::bench::GLIMMER_ISA_NS {
namespace {

#if defined(GLIMMER_ISA_AVX512)
constexpr int kWidth = 64;
#elif defined(GLIMMER_ISA_AVX2)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
typedef uint64_t Words __attribute__((vector_size(kWidth)));
typedef float Floats __attribute__((vector_size(kWidth)));

// Accumulators: more than latency (4 or 5 cycles) times two ports, fewer than registers.
constexpr int kChains = 12;

uint64_t read(const uint8_t* data, size_t stream) {
  Words sum[2] = {};
  for (size_t i = 0; i < stream; i += 128)
    for (int s = 0; s < kStreams; ++s) {
      const auto* p = reinterpret_cast<const Words*>(data + s * stream + i);
      for (int w = 0; w < 128 / kWidth; ++w) sum[w & 1] ^= p[w];
    }
  uint64_t total = 0;
  for (size_t w = 0; w < kWidth / sizeof(uint64_t); ++w) total ^= sum[0][w] ^ sum[1][w];
  return total;
}

// Keeps the compiler from knowing v, and from dropping what v depends on.
template <class V>
void opaque(V& v) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}

int64_t fp32(int64_t rounds) {
  Floats sum[kChains] = {}, scale = {}, add = {};
  for (int i = 0; i < kWidth / 4; ++i) scale[i] = 0.5f, add[i] = 1.0f;
  opaque(scale);
  opaque(add);
  for (int64_t r = 0; r < rounds; ++r)
    for (Floats& s : sum) s = s * scale + add;  // contracted: the build asks for it here
  for (Floats& s : sum) opaque(s);
  return rounds * kChains * (kWidth / 4) * 2;
}

int64_t int8(int64_t rounds) {
#if defined(GLIMMER_ISA_AVX512)
  __m512i sum[kChains] = {}, a = _mm512_set1_epi8(1);
  opaque(a);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = _mm512_dpbusd_epi32(s, a, a);
#elif defined(GLIMMER_ISA_AVX2)
  __m256i sum[kChains] = {}, a = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  opaque(ones);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) {
      opaque(a);  // else the product is computed once
      s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, a), ones));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
  int32x4_t sum[kChains] = {};
  int8x16_t a = vdupq_n_s8(1);
  opaque(a);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& s : sum) s = vdotq_s32(s, a, a);
#else
  (void)rounds;
  return 0;
#endif
#if defined(GLIMMER_ISA_AVX512) || defined(GLIMMER_ISA_AVX2) || defined(__ARM_FEATURE_DOTPROD)
  for (auto& s : sum) opaque(s);
  return rounds * kChains * kWidth * 2;
#endif
}

}  // namespace

const Loops kLoops = {read, fp32, int8};

}  // namespace glimmer::bench::GLIMMER_ISA_NS
