// Expected tokens a second of each block length, from fading counts and measured costs.
#include "block_policy.h"

#include <algorithm>

#include "checks.h"

namespace glimmer {
namespace {

constexpr int64_t kLengths[] = {2, 3, 4, 6, 8, 12, 16};  // few, so that each is measured soon
constexpr double kFade = 0.9;                            // of the counts, a pass
constexpr double kPauseFade = 0.25;                      // of the counts, a pause
constexpr double kPrior = 0.75;       // acceptance of a draft before any was seen
constexpr double kPriorWeight = 0.5;  // drafts that the prior counts for
constexpr int64_t kTrusted =
    2;  // passes of a length before its cost is believed: the first may be cold
constexpr int64_t kProbe = 4;                       // length of the block that ends a pause
constexpr int64_t kMinPause = 16, kMaxPause = 256;  // tokens

}  // namespace

double BlockPolicy::Costs::least() const {
  const int64_t n = std::min<int64_t>(count, kKept);
  return n == 0 ? 0 : *std::min_element(seconds.begin(), seconds.begin() + n);
}

BlockPolicy::BlockPolicy(int64_t max_block) : max_block_(max_block), next_pause_(kMinPause) {
  check_range("max_block", max_block, 2, 1 << 20);
  costs_.resize(static_cast<size_t>(max_block + 1));
  tried_.resize(static_cast<size_t>(max_block));
  accepted_.resize(static_cast<size_t>(max_block));
}

void BlockPolicy::restart() {
  std::fill(tried_.begin(), tried_.end(), 0.0);
  std::fill(accepted_.begin(), accepted_.end(), 0.0);
  pause_ = 0;
  next_pause_ = kMinPause;
}

int64_t BlockPolicy::choose(int64_t limit) {
  limit = std::min(limit, max_block_);
  if (limit < 2 || costs_[1].count < kTrusted) return 1;
  if (pause_ > 0) return --pause_ == 0 ? std::min(kProbe, limit) : 1;
  const int64_t block = best(limit);
  if (block > 1) {
    next_pause_ = kMinPause;
    return block;
  }
  pause_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kMaxPause);
  for (double& count : tried_) count *= kPauseFade;
  for (double& count : accepted_) count *= kPauseFade;
  return 1;
}

void BlockPolicy::observe(int64_t block, int64_t accepted, double seconds) {
  check_range("block", block, 1, max_block_);
  check_range("accepted", accepted, 0, block - 1);
  Costs& c = costs_[block];
  c.seconds[c.count++ % kKept] = seconds;
  for (int64_t depth = 1; depth <= std::min(accepted + 1, block - 1); ++depth) {
    tried_[depth] = kFade * tried_[depth] + 1;
    accepted_[depth] = kFade * accepted_[depth] + (depth <= accepted ? 1 : 0);
  }
}

// How often the draft at this depth is right once all before it are; depths that are rarely
// reached lean on the one before.
double BlockPolicy::acceptance(int64_t depth) const {
  double p = kPrior;
  for (int64_t d = 1; d <= depth; ++d)
    p = (accepted_[d] + kPriorWeight * p) / (tried_[d] + kPriorWeight);
  return p;
}

double BlockPolicy::tokens(int64_t block) const {
  double expected = 1, reach = 1;
  for (int64_t depth = 1; depth < block; ++depth) {
    reach *= acceptance(depth);
    expected += reach;
  }
  return expected;
}

double BlockPolicy::cost(int64_t block) const {
  while (block > 1 && costs_[block].count < kTrusted) --block;
  return costs_[block].least();
}

int64_t BlockPolicy::best(int64_t limit) const {
  int64_t best = 1;
  double rate = 1 / cost(1);
  for (int64_t block : kLengths) {
    if (block > limit) break;
    const double r = tokens(block) / cost(block);
    if (r > rate) {
      best = block;
      rate = r;
    }
    if (costs_[block].count < kTrusted) break;  // longer ones wait for what this one costs
  }
  return best;
}

std::vector<double> BlockPolicy::measured() const {
  std::vector<double> seconds;
  for (const Costs& c : costs_) seconds.push_back(c.least());
  return seconds;
}

}  // namespace glimmer
