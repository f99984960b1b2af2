// Session::generate: prefill, then passes that each give one token or, speculating, several.
#include <algorithm>
#include <chrono>

#include "checks.h"
#include "session.h"

namespace glimmer {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Counts passes, and chooses the blocks of the next ones.
class Speculator {
 public:
  Speculator(const Speculation& how, int64_t max_block, BlockPolicy& policy)
      : fixed_(how.block), policy_(policy) {
    policy_.restart();
    stats.passes_by_block.resize(static_cast<size_t>(max_block + 1));
    stats.passes_by_accepted.resize(static_cast<size_t>(max_block));
  }

  int64_t choose(int64_t limit) {
    return fixed_ > 0 ? std::min(fixed_, limit) : policy_.choose(limit);
  }

  // A pass with `block` rows gave `tokens`, of which `used` are part of the text.
  void observe(int64_t block, int64_t tokens, int64_t used, const PassSeconds& seconds) {
    policy_.observe(block, tokens - 1, seconds.total());
    ++stats.passes;
    stats.drafted += block - 1;
    stats.accepted += used - 1;
    ++stats.passes_by_block[block];
    if (block > 1) ++stats.passes_by_accepted[used - 1];
    stats.seconds.draft += seconds.draft;
    stats.seconds.verify += seconds.verify;
    stats.seconds.inject += seconds.inject;
    stats.seconds_by_block = policy_.measured();
  }

  SpeculationStats stats;

 private:
  int64_t fixed_;
  BlockPolicy& policy_;
};

}  // namespace

GenerateResult Session::generate(int64_t slot, const std::vector<int64_t>& ids,
                                 int64_t max_new_tokens, const SamplingParams& sampling,
                                 const std::vector<int64_t>& stop_ids, int64_t chunk,
                                 const Callback& callback,
                                 const std::optional<Speculation>& speculation) {
  check_generate(slot, ids, max_new_tokens, sampling, chunk, speculation);
  const int64_t n = static_cast<int64_t>(ids.size());

  GenerateResult result;
  auto start = Clock::now();
  if (n > 1) {
    prefill(slot, std::vector<int64_t>(ids.begin(), ids.end() - 1), chunk, std::vector<int64_t>{});
    result.prefill_tokens = n - 1;
    result.prefill_seconds = seconds_since(start);
  }
  start = Clock::now();
  std::optional<Speculator> speculator;
  if (speculation) speculator.emplace(*speculation, limits().draft.block_size, *policy_);
  int64_t id = ids.back();
  for (bool go_on = true; go_on && result.decode_tokens < max_new_tokens;) {
    poll();
    const int64_t limit = std::min(max_new_tokens - result.decode_tokens, room(slot));
    const int64_t block = speculator ? std::max<int64_t>(1, speculator->choose(limit)) : 1;
    PassSeconds seconds;
    const std::vector<int64_t> next = speculate({{slot, id, block, sampling}}, &seconds)[0];
    id = next.back();
    const int64_t before = result.decode_tokens;
    go_on = deliver(slot, next, stop_ids, callback, result);
    if (speculator)
      speculator->observe(block, static_cast<int64_t>(next.size()), result.decode_tokens - before,
                          seconds);
  }
  result.decode_seconds = seconds_since(start);
  if (speculator) result.speculation = std::move(speculator->stats);
  return result;
}

// Hands tokens out one by one, as if each had its own step: what follows the last one wanted is
// taken back, and so is it when the callback throws.
bool Session::deliver(int64_t slot, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& stop_ids, const Callback& callback,
                      GenerateResult& result) {
  const int64_t n = static_cast<int64_t>(ids.size()), start = length(slot) - n;
  const auto stop_after = [&](int64_t used) {  // the callback may have truncated the slot itself
    if (length(slot) > start + used) truncate(slot, start + used);
  };
  for (int64_t i = 0; i < n; ++i) {
    result.ids.push_back(ids[i]);
    ++result.decode_tokens;
    bool go_on = true;
    try {
      go_on = !callback || callback(ids[i]);
    } catch (...) {
      stop_after(i + 1);
      throw;
    }
    const bool stop = std::find(stop_ids.begin(), stop_ids.end(), ids[i]) != stop_ids.end();
    if (!stop && go_on) continue;
    result.stop_reason = stop ? StopReason::StopId : StopReason::Callback;
    stop_after(i + 1);
    return false;
  }
  return true;
}

void Session::check_generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                             const SamplingParams& sampling, int64_t chunk,
                             const std::optional<Speculation>& speculation) const {
  Busy busy(*this);
  const int64_t n = static_cast<int64_t>(ids.size());
  check_open("slot", slot);
  check_ids(ids);
  check_range("chunk", chunk, 1, limits().max_chunk);
  check_sampling("sampling.", sampling);
  check_room("ids", slot, n);
  // The last sampled id needs no position
  check_range("max_new_tokens", max_new_tokens, 1, limits().max_seq_len - lengths_[slot] - n + 1);
  if (!speculation) return;
  if (!draft_) bad("speculation: expected a session with a draft, found one without");
  if (speculation->block != 0)
    check_range("speculation: block", speculation->block, 2, limits().draft.block_size);
}

}  // namespace glimmer
