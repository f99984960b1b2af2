// sample: the next token of each row: argmax, or Gumbel-max over temperature, top-k and top-p.
//
// Everything that decides a token is an integer or a fixed sequence of float32 operations, so that
// a row's token is the same on every ISA and in every batch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "glimmer/half.h"
#include "glimmer/op.h"
#include "glimmer/philox.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

constexpr bool same(PhiloxBlock a, PhiloxBlock b) {
  for (int i = 0; i < 4; ++i)
    if (a.word[i] != b.word[i]) return false;
  return true;
}
// The known-answer vectors of Random123 for philox4x32 with 10 rounds.
static_assert(same(philox4x32_10({{0, 0, 0, 0}}, 0, 0),
                   {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
static_assert(same(philox4x32_10({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u),
                   {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
static_assert(same(philox4x32_10({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822,
                                 0x299f31d0),
                   {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));

// Weights of the top-p rule are integers in units of 2^-40 of the largest, so that their sums are
// exact in any order; this many cannot overflow 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 23;
constexpr int kWeightBits = 40;

Status infer(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
             const Tensor& top_p, const Tensor& seed, const Tensor& step, Shape& out) {
  GLIMMER_RETURN_IF_ERROR(expect_dtype(logits, DType::F32));
  GLIMMER_RETURN_IF_ERROR(expect_dims(logits, 2));
  GLIMMER_RETURN_IF_ERROR(expect(logits.size(1) >= 1 && logits.size(1) <= kMaxVocab, logits,
                                 "1 to " + std::to_string(kMaxVocab) + " columns"));
  const int64_t rows = logits.size(0);
  GLIMMER_RETURN_IF_ERROR(expect_shape(temperature, shape_of(DType::F32, {rows})));
  GLIMMER_RETURN_IF_ERROR(expect_shape(top_k, shape_of(DType::I64, {rows})));
  GLIMMER_RETURN_IF_ERROR(expect_shape(top_p, shape_of(DType::F32, {rows})));
  GLIMMER_RETURN_IF_ERROR(expect_shape(seed, shape_of(DType::I64, {rows})));
  GLIMMER_RETURN_IF_ERROR(expect_shape(step, shape_of(DType::I64, {rows})));
  out = shape_of(DType::I64, {rows});
  return {};
}

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature;
  int64_t top_k;
  float top_p;
  int64_t seed, step;
  float max = 0;  // the largest logit

  // The tempered logit relative to the largest: 0 for the largest, so that no temperature
  // overflows.
  float score(int64_t id) const { return (logits[id] - max) / temperature; }
};

Status check_parameters(const float* temperature, const float* top_p, int64_t row) {
  const std::string at = ": row " + std::to_string(row) + ": expected ";
  if (!(temperature[row] >= 0) || std::isinf(temperature[row]))
    return Status::error("temperature" + at + "a finite value >= 0, found " +
                         std::to_string(temperature[row]));
  if (!(top_p[row] >= 0))
    return Status::error("top_p" + at + "a value >= 0, found " + std::to_string(top_p[row]));
  return {};
}

enum class Fault : uint8_t { None, NaN, Infinite, Empty };

// Finds the largest logit, or what makes the row unusable.
Fault scan(Row& row) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  float max = -inf;
  bool usable = true;
  for (int64_t i = 0; i < row.vocab; ++i) {
    usable &= row.logits[i] < inf;
    max = row.logits[i] > max ? row.logits[i] : max;
  }
  row.max = max;
  if (usable) return max == -inf ? Fault::Empty : Fault::None;
  for (int64_t i = 0; i < row.vocab; ++i)
    if (std::isnan(row.logits[i])) return Fault::NaN;
  return Fault::Infinite;
}

Status describe(Fault fault, int64_t row) {
  if (fault == Fault::None) return {};
  const char* what = fault == Fault::NaN ? "NaN" : fault == Fault::Infinite ? "+inf" : "only -inf";
  return Status::error("logits: row " + std::to_string(row) + " has " + what);
}

// floor(2^40 · e^x) for x ≤ 0: Cody and Waite's reduction and a Taylor polynomial, in float32.
uint64_t weight_of(float x) {
  if (!(x > -28.0f)) return 0;  // e^-28 < 2^-40
  const int n = static_cast<int>(x * 1.44269504f - 0.5f);
  const float f = static_cast<float>(n);
  const float r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
  float p = 1.0f / 5040;
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  return static_cast<uint64_t>(p * float_of(static_cast<uint32_t>(127 + kWeightBits + n) << 23));
}

// Descending logits, then ascending ids: the order in which top-k and top-p keep tokens.
struct Before {
  const float* logits;
  bool operator()(int64_t a, int64_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

// ⌈total · top_p⌉ with top_p in units of 2^-24, rounded up; without 128-bit arithmetic, so that
// devices compute the same.
uint64_t top_p_mass(uint64_t total, float top_p) {
  const uint64_t p = static_cast<uint64_t>(std::ceil(top_p * 0x1p24f));
  const uint64_t high = (total >> 24) * p, low = (total & 0xffffff) * p;
  return high + ((low + 0xffffff) >> 24);
}

// Keeps the shortest prefix in `Before` order whose weight reaches top_p of the total; at least
// one.
void keep_top_p(const Row& row, std::vector<int64_t>& ids) {
  uint64_t total = 0;
  for (int64_t id : ids) total += weight_of(row.score(id));
  const uint64_t mass = top_p_mass(total, row.top_p);
  const Before before{row.logits};
  uint64_t sum = 0;
  // Sorts only as far as needed: the prefix is short for all but flat distributions.
  for (size_t sorted = 0, next = 64; sorted < ids.size(); sorted = next, next *= 4) {
    next = std::min(next, ids.size());
    std::nth_element(ids.begin() + sorted, ids.begin() + (next - 1), ids.end(), before);
    std::sort(ids.begin() + sorted, ids.begin() + next, before);
    for (size_t i = sorted; i < next; ++i) {
      sum += weight_of(row.score(ids[i]));
      if (sum >= mass) return ids.resize(i + 1);
    }
  }
}

void keep_top_k(const Row& row, std::vector<int64_t>& ids) {
  std::nth_element(ids.begin(), ids.begin() + (row.top_k - 1), ids.end(), Before{row.logits});
  ids.resize(row.top_k);
}

// argmax of score + noise over ascending ids; ties go to the lowest id. Noise is only drawn where
// the score could still win.
class GumbelMax {
 public:
  explicit GumbelMax(const Row& row) : row_(row) {}

  void offer(int64_t id) {
    const float score = row_.score(id);
    if (!(score + kMaxGumbel >= best_)) return;
    if (id / 4 != block_) {
      block_ = id / 4;
      words_ = sample_words(row_.seed, row_.step, block_);
    }
    if (too_small(words_.word[id % 4], best_ - score)) return;
    const float value = score + gumbel_of(words_.word[id % 4]);
    if (value > best_ || (value == best_ && id < token_)) {
      best_ = value;
      token_ = id;
    }
  }
  int64_t token() const { return token_; }

 private:
  // Noise ≥ d means 1 - u ≤ -ln u ≤ e^-d ≤ 1 / (1 + d + d²/2): spares most tokens the logarithms.
  // The margin is far above what float32 rounding could turn.
  static bool too_small(uint32_t word, float d) {
    return d > 0 && (1.0f - uniform_of(word)) * (1.0f + d + 0.5f * d * d) > 1.01f;
  }

  const Row& row_;
  PhiloxBlock words_{};
  int64_t block_ = -1, token_ = -1;
  float best_ = -std::numeric_limits<float>::max();  // so that -inf never wins
};

int64_t first_max(const Row& row) {
  return std::find(row.logits, row.logits + row.vocab, row.max) - row.logits;
}

int64_t sample_row(const Row& row) {
  const int64_t top = first_max(row);
  if (row.temperature == 0) return top;
  GumbelMax best(row);
  best.offer(top);  // always kept; first, so that it rules out most others
  const bool limit_k = row.top_k > 0 && row.top_k < row.vocab, limit_p = row.top_p < 1;
  if (!limit_k && !limit_p) {
    for (int64_t id = 0; id < row.vocab; ++id) best.offer(id);
    return best.token();
  }
  std::vector<int64_t> ids(row.vocab);
  std::iota(ids.begin(), ids.end(), 0);
  if (limit_k) keep_top_k(row, ids);
  if (limit_p) keep_top_p(row, ids);
  for (int64_t id : ids) best.offer(id);
  return best.token();
}

Status run(const Context& ctx, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
           const Tensor& top_p, const Tensor& seed, const Tensor& step, Tensor& out) {
  const int64_t n = logits.size(0), vocab = logits.size(1);
  std::vector<Row> rows;
  for (int64_t r = 0; r < n; ++r) {
    GLIMMER_RETURN_IF_ERROR(check_parameters(temperature.ptr<float>(), top_p.ptr<float>(), r));
    rows.push_back({logits.ptr<float>() + r * vocab, vocab, temperature.ptr<float>()[r],
                    top_k.ptr<int64_t>()[r], top_p.ptr<float>()[r], seed.ptr<int64_t>()[r],
                    step.ptr<int64_t>()[r]});
  }
  std::vector<Fault> faults(n);
  ctx.parallel(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) faults[r] = scan(rows[r]);
  });
  for (int64_t r = 0; r < n; ++r) GLIMMER_RETURN_IF_ERROR(describe(faults[r], r));
  ctx.parallel(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out.ptr<int64_t>()[r] = sample_row(rows[r]);
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(sample, infer, run, "logits", "temperature", "top_k", "top_p", "seed", "step")
}  // namespace glimmer::GLIMMER_ISA_NS
