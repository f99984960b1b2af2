// Steps of a decoding session: validation, pages, the model's call, and undo.
#include "session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "checks.h"

namespace glimmer {
namespace {

Caches make_caches(const ModelLimits& limits, Network network, std::optional<uint64_t> seed) {
  PagePool::Config shape;
  shape.slots = limits.slots;
  shape.max_pages = limits.max_pages();
  shape.page_size = limits.page_size;
  shape.seed = seed;
  return {limits.caches(network), shape, network == Network::Draft ? "draft " : ""};
}

const std::shared_ptr<Model>& check_model(const std::shared_ptr<Model>& model) {
  if (!model) bad("model: expected a model, found none");
  check_limits(model->limits());
  return model;
}

bool all_finite(const float* x, int64_t n) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t bad_values = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bad_values |= static_cast<uint32_t>((bits & kExponent) == kExponent);
  }
  return bad_values == 0;
}

// The slots of a step with their numbers of tokens, in order of appearance.
std::vector<std::pair<int64_t, int64_t>> tokens_per_slot(const std::vector<int64_t>& slots) {
  std::vector<std::pair<int64_t, int64_t>> counts;
  for (int64_t slot : slots) {
    if (slot < 0) continue;
    const auto same = [slot](const auto& c) { return c.first == slot; };
    const auto it = std::find_if(counts.begin(), counts.end(), same);
    if (it == counts.end()) {
      counts.emplace_back(slot, 1);
    } else {
      ++it->second;
    }
  }
  return counts;
}

Logits make_logits(size_t rows, int64_t vocab_size) {
  Logits logits;
  logits.rows = static_cast<int64_t>(rows);
  logits.vocab_size = vocab_size;
  logits.data.resize(rows * static_cast<size_t>(vocab_size));
  return logits;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<int64_t> real_rows(const Step& step) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < step.size(); ++i)
    if (step.slot[i] >= 0) rows.push_back(i);
  return rows;
}

// Appends the n positions of a slot from `first` on.
void append_rows(Step& step, int64_t slot, int64_t first, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    step.pos.push_back(first + i);
    step.slot.push_back(slot);
  }
}

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void check_cache_limits(const CacheLimits& l, const std::string& prefix) {
  check_range(prefix + "n_layers", l.n_layers(), 1, kMaxInt32);
  check_range(prefix + "window", l.window, 0, kMaxInt32);
  for (int64_t i = 0; i < l.n_layers(); ++i)
    check_range(prefix + indexed("sliding_layers", i), l.sliding_layers[i], 0, 1);
  if (l.has(LayerKind::Global)) check_range(prefix + "global_pages", l.global_pages, 1, kMaxInt32);
  if (l.has(LayerKind::Sliding)) {
    check_range(prefix + "sliding_pages", l.sliding_pages, 1, kMaxInt32);
    check_range(prefix + "window", l.window, 1, kMaxInt32);
  } else if (l.window != 0) {
    bad(prefix + "window: expected 0 for a model without sliding layers" + found(l.window));
  }
}

}  // namespace

void check_sampling(const std::string& name, const SamplingParams& p) {
  const auto number = [](double v) { return ", found " + std::to_string(v); };
  if (!(p.temperature >= 0 && std::isfinite(static_cast<float>(p.temperature))))
    bad(name + "temperature: expected a finite float32 >= 0" + number(p.temperature));
  if (p.top_k < 0) bad(name + "top_k: expected a value >= 0" + found(p.top_k));
  if (!(p.top_p > 0 && p.top_p <= 1))
    bad(name + "top_p: expected a value in (0, 1]" + number(p.top_p));
}

void check_limits(const ModelLimits& l) {
  check_range("vocab_size", l.vocab_size, 1, kMaxInt32);
  check_range("max_seq_len", l.max_seq_len, 1, kMaxInt32);
  check_range("max_chunk", l.max_chunk, 1, l.max_seq_len);
  check_range("max_rows", l.max_rows, 1, l.max_chunk);
  check_range("slots", l.slots, 1, kMaxInt32);
  check_range("page_size", l.page_size, 1, kMaxInt32);
  check_cache_limits(l, "");
  if (!l.has_draft()) return;
  check_range("draft.block_size", l.draft.block_size, 2, kMaxDecodeRows);
  check_range("draft.mask_token_id", l.draft.mask_token_id, 0, l.vocab_size - 1);
  check_cache_limits(l.draft, "draft.");
}

Session::Attachment::Attachment(Model& model) : model_(model) {
  if (model_.attached.exchange(true))
    bad("model: expected one that no session uses, found one in use");
}

Session::Busy::Busy(const Session& session) : busy_(session.busy_) {
  if (busy_.exchange(true))
    throw std::runtime_error("session: expected one call at a time, found another one running");
}

// Restores tables and lengths unless the step is done.
class Session::Transaction {
 public:
  explicit Transaction(Session& s)
      : session_(s), target_(s.target_), draft_(s.draft_), lengths_(s.lengths_) {}
  ~Transaction() {
    if (done_) return;
    session_.target_ = std::move(target_);
    session_.draft_ = std::move(draft_);
    session_.lengths_ = std::move(lengths_);
  }
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void done() { done_ = true; }

 private:
  Session& session_;
  Caches target_;
  std::optional<Caches> draft_;
  std::vector<int64_t> lengths_;
  bool done_ = false;
};

Session::Session(std::shared_ptr<Model> model, std::optional<uint64_t> page_seed, bool draft)
    : model_(check_model(model)),
      attachment_(*model_),
      target_(make_caches(limits(), Network::Target, page_seed)),
      lengths_(static_cast<size_t>(limits().slots)),
      open_(static_cast<size_t>(limits().slots)) {
  if (!draft) return;
  if (!limits().has_draft())
    bad("draft: expected a model exported with a draft model, found one without");
  draft_ = make_caches(limits(), Network::Draft, page_seed);
  policy_.emplace(limits().draft.block_size);
}

int64_t Session::open() {
  Busy busy(*this);
  const auto it = std::find(open_.begin(), open_.end(), false);
  if (it == open_.end())
    throw std::runtime_error("no free slot: all " + std::to_string(limits().slots) + " are open");
  *it = true;
  return it - open_.begin();
}

void Session::close(int64_t slot) {
  Busy busy(*this);
  check_open("slot", slot);
  target_.release(slot);
  if (draft_) draft_->release(slot);
  lengths_[slot] = 0;
  open_[slot] = false;
}

void Session::truncate(int64_t slot, int64_t length) {
  Busy busy(*this);
  check_open("slot", slot);
  check_range("length", length, 0, lengths_[slot]);
  Transaction transaction(*this);
  roll_back(slot, length);
  transaction.done();
}

void Session::share(int64_t src, int64_t dst, int64_t n) {
  Busy busy(*this);
  check_open("src", src);
  check_open("dst", dst);
  if (lengths_[dst] != 0)
    bad("dst: expected an empty slot, found slot " + std::to_string(dst) + " with " +
        std::to_string(lengths_[dst]) + " tokens");
  check_range("n", n, 0, lengths_[src]);
  Transaction transaction(*this);
  target_.share(src, dst, n);
  if (draft_) draft_->share(src, dst, n);
  lengths_[dst] = n;
  transaction.done();
}

int64_t Session::length(int64_t slot) const {
  Busy busy(*this);
  check_open("slot", slot);
  return lengths_[slot];
}

const Caches& Session::caches(Network network) const {
  if (network == Network::Target) return target_;
  if (!draft_) bad("kind: expected one of a session with a draft, found a draft's");
  return *draft_;
}

std::vector<int32_t> Session::table(Network network, LayerKind kind) const {
  Busy busy(*this);
  return caches(network).table(kind);
}

int64_t Session::pages_in_use(Network network, LayerKind kind) const {
  Busy busy(*this);
  return caches(network).pool(kind).used_pages();
}

int64_t Session::room(int64_t slot) const {
  Busy busy(*this);
  check_open("slot", slot);
  const int64_t pages = std::min(target_.room(slot), draft_ ? draft_->room(slot) : kMaxInt32);
  return std::min(pages, limits().max_seq_len - lengths_[slot]);
}

Logits Session::prefill(int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
                        const Rows& rows) {
  Busy busy(*this);
  const int64_t n = static_cast<int64_t>(ids.size());
  check_open("slot", slot);
  check_ids(ids);
  check_range("chunk", chunk, 1, limits().max_chunk);
  const std::vector<int64_t> wanted = rows.value_or(std::vector<int64_t>{n - 1});
  for (size_t i = 0; i < wanted.size(); ++i) check_range(indexed("rows", i), wanted[i], 0, n - 1);
  check_room("ids", slot, n);
  check_pages(slot, n, chunk);

  Logits logits = make_logits(wanted.size(), limits().vocab_size);
  const int64_t start = lengths_[slot];
  try {
    prefill_chunks(slot, ids, chunk, wanted, logits);
  } catch (...) {
    if (target_.can_truncate(slot, start) && (!draft_ || draft_->can_truncate(slot, start)))
      roll_back(slot, start);
    throw;
  }
  return logits;
}

void Session::prefill_chunks(int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
                             const std::vector<int64_t>& rows, Logits& logits) {
  const int64_t n = static_cast<int64_t>(ids.size());
  for (int64_t begin = 0; begin < n; begin += chunk) {
    poll();
    const int64_t end = std::min(n, begin + chunk);
    std::vector<int64_t> local;
    std::vector<float*> out;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < begin || rows[i] >= end) continue;
      local.push_back(rows[i] - begin);
      out.push_back(logits.data.data() + i * static_cast<size_t>(logits.vocab_size));
    }
    Step step = chunk_step(slot, ids, begin, end);
    run_forward(step, local, out);
  }
}

Logits Session::forward(const std::vector<Token>& tokens, const std::vector<int64_t>& rows,
                        const Positions& positions) {
  Busy busy(*this);
  const int64_t n = static_cast<int64_t>(tokens.size());
  check_range("tokens", n, 1, limits().max_chunk);
  Step step = make_step(tokens, positions);
  for (size_t i = 0; i < rows.size(); ++i) {
    check_range(indexed("rows", i), rows[i], 0, n - 1);
    if (step.slot[rows[i]] < 0)
      bad(indexed("rows", i) + ": expected a token of a slot, found padding row " +
          std::to_string(rows[i]));
  }
  Logits logits = make_logits(rows.size(), limits().vocab_size);
  std::vector<float*> out;
  for (size_t i = 0; i < rows.size(); ++i)
    out.push_back(logits.data.data() + i * static_cast<size_t>(logits.vocab_size));
  run_forward(step, rows, out);
  return logits;
}

std::vector<int64_t> Session::decode(const std::vector<Token>& tokens,
                                     const std::vector<SamplingParams>& sampling) {
  Busy busy(*this);
  check_range("tokens", static_cast<int64_t>(tokens.size()), 1, kMaxDecodeRows);
  if (sampling.size() != tokens.size())
    bad("sampling: expected one entry a token, " + std::to_string(tokens.size()) +
        found(static_cast<int64_t>(sampling.size())));
  for (size_t i = 0; i < sampling.size(); ++i)
    check_sampling(indexed("sampling", i) + ".", sampling[i]);
  Step step = make_step(tokens, {});
  Transaction transaction(*this);
  const std::vector<int64_t> next = run_decode(step, sampling);
  keep(step, real_rows(step));
  transaction.done();
  return next;
}

std::vector<int64_t> Session::run_decode(Step& step, const std::vector<SamplingParams>& sampling) {
  step.tap = draft_.has_value();
  reserve(Network::Target, step);
  const std::vector<int64_t> next = model_->decode(step, sampling);
  check_sampled("decode", step, next);
  return next;
}

void Session::check_sampled(const std::string& method, const Step& step,
                            const std::vector<int64_t>& ids) const {
  if (ids.size() != step.pos.size())
    throw std::runtime_error(method + ": expected " + std::to_string(step.size()) + " ids" +
                             found(static_cast<int64_t>(ids.size())));
  for (size_t i = 0; i < ids.size(); ++i)
    if (step.slot[i] >= 0 && (ids[i] < 0 || ids[i] >= limits().vocab_size))
      throw std::runtime_error(method + ": row " + std::to_string(i) + " of slot " +
                               std::to_string(step.slot[i]) + ": expected an id in [0, " +
                               std::to_string(limits().vocab_size) + ")" + found(ids[i]) +
                               ": its logits are not finite");
}

std::vector<std::vector<int64_t>> Session::speculate(const std::vector<Anchor>& anchors,
                                                     PassSeconds* seconds) {
  Busy busy(*this);
  check_anchors(anchors);
  Transaction transaction(*this);
  PassSeconds spent;
  auto start = std::chrono::steady_clock::now();
  const auto lap = [&start](double& field) {
    field = seconds_since(start);
    start = std::chrono::steady_clock::now();
  };
  const std::vector<std::vector<int64_t>> blocks = draft_blocks(anchors);
  lap(spent.draft);

  Step step;
  std::vector<SamplingParams> sampling;
  for (size_t a = 0; a < anchors.size(); ++a) {
    append_rows(step, anchors[a].slot, lengths_[anchors[a].slot], anchors[a].block);
    step.ids.insert(step.ids.end(), blocks[a].begin(), blocks[a].end());
    sampling.insert(sampling.end(), blocks[a].size(), anchors[a].sampling);
  }
  const std::vector<int64_t> next = run_decode(step, sampling);
  lap(spent.verify);

  std::vector<std::vector<int64_t>> results;
  std::vector<int64_t> rows;  // the anchors and the accepted drafts
  for (size_t a = 0, first = 0; a < anchors.size(); first += blocks[a++].size()) {
    size_t n = 1;
    while (n < blocks[a].size() && blocks[a][n] == next[first + n - 1]) ++n;
    results.emplace_back(next.begin() + first, next.begin() + first + n);
    for (size_t i = 0; i < n; ++i) rows.push_back(static_cast<int64_t>(first + i));
  }
  keep(step, rows);
  for (const Anchor& a : anchors) roll_back(a.slot, lengths_[a.slot]);  // drops unused pages
  transaction.done();
  lap(spent.inject);
  if (seconds) *seconds = spent;
  return results;
}

// The tokens to verify: each anchor and what the draft model names after it.
std::vector<std::vector<int64_t>> Session::draft_blocks(const std::vector<Anchor>& anchors) {
  Step step;
  std::vector<SamplingParams> sampling;
  for (const Anchor& a : anchors) {
    if (a.block < 2) continue;
    append_rows(step, a.slot, lengths_[a.slot], a.block);
    step.ids.push_back(a.id);
    step.ids.resize(step.pos.size(), limits().draft.mask_token_id);
    sampling.resize(step.pos.size(), a.sampling);
  }
  std::vector<int64_t> drafted;
  if (step.size() > 0) {
    reserve(Network::Draft, step);
    drafted = model_->draft(step, sampling);
    check_sampled("draft", step, drafted);
  }
  std::vector<std::vector<int64_t>> blocks;
  auto next = drafted.begin();
  for (const Anchor& a : anchors) {
    blocks.push_back({a.id});
    if (a.block < 2) continue;
    blocks.back().insert(blocks.back().end(), next + 1, next + a.block);
    next += a.block;
  }
  return blocks;
}

// Makes these rows of a target's step part of their sequences.
void Session::keep(const Step& step, const std::vector<int64_t>& rows) {
  Step kept;
  for (int64_t row : rows) append_rows(kept, step.slot[row], step.pos[row], 1);
  if (draft_) {
    reserve(Network::Draft, kept);
    model_->inject(kept, rows);
  }
  for (const auto& [slot, n] : tokens_per_slot(kept.slot)) {
    target_.commit(slot, n);
    if (draft_) draft_->commit(slot, n);
    lengths_[slot] += n;
  }
}

void Session::check_open(const std::string& argument, int64_t slot) const {
  check_range(argument, slot, 0, limits().slots - 1);
  if (!open_[slot]) bad(argument + ": expected an open slot" + found(slot) + ", which is closed");
}

void Session::check_ids(const std::vector<int64_t>& ids) const {
  if (ids.empty()) bad("ids: expected at least one token, found none");
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= limits().vocab_size)
      bad(indexed("ids", i) + ": expected a token id in [0, " +
          std::to_string(limits().vocab_size) + ")" + found(ids[i]));
}

void Session::check_room(const std::string& argument, int64_t slot, int64_t n) const {
  const int64_t room = limits().max_seq_len - lengths_[slot];
  if (n > room)
    bad(argument + ": expected at most " + std::to_string(room) +
        " tokens, what is left of max_seq_len " + std::to_string(limits().max_seq_len) +
        " in slot " + std::to_string(slot) + found(n));
}

// A rehearsal on copies of the tables, so that a prompt that does not fit is refused before work.
void Session::check_pages(int64_t slot, int64_t n, int64_t chunk) const {
  for (const Caches* caches : {&target_, draft_ ? &*draft_ : nullptr}) {
    if (!caches) continue;
    Caches rehearsal = *caches;
    for (int64_t begin = 0; begin < n; begin += chunk) {
      const int64_t size = std::min(chunk, n - begin);
      rehearsal.reserve(slot, lengths_[slot] + begin, size, [](LayerKind, PageCopy) {});
      rehearsal.commit(slot, size);
    }
  }
}

Step Session::chunk_step(int64_t slot, const std::vector<int64_t>& ids, int64_t begin,
                         int64_t end) const {
  Step step;
  step.ids.assign(ids.begin() + begin, ids.begin() + end);
  append_rows(step, slot, lengths_[slot], end - begin);
  return step;
}

Step Session::make_step(const std::vector<Token>& tokens, const Positions& positions) const {
  if (positions && positions->size() != tokens.size())
    bad("positions: expected one entry a token, " + std::to_string(tokens.size()) +
        found(static_cast<int64_t>(positions->size())));
  Step step;
  std::vector<int64_t> next = lengths_;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int64_t slot = tokens[i].slot;
    if (slot != -1) check_open(indexed("tokens", i) + ": slot", slot);
    step.ids.push_back(tokens[i].id);
    step.slot.push_back(slot);
    step.pos.push_back(slot == -1 ? 0 : positions ? (*positions)[i] : next[slot]++);
  }
  check_step(step);
  return step;
}

void Session::check_step(const Step& step) const {
  check_ids(step.ids);
  const auto counts = tokens_per_slot(step.slot);
  if (counts.empty()) bad("tokens: expected at least one token of a slot, found padding only");
  for (const auto& [slot, n] : counts) {
    check_room("tokens", slot, n);
    std::vector<bool> seen(static_cast<size_t>(n));
    for (size_t i = 0; i < step.slot.size(); ++i) {
      if (step.slot[i] != slot) continue;
      const int64_t first = lengths_[slot];
      check_range(indexed("positions", i), step.pos[i], first, first + n - 1);
      if (seen[step.pos[i] - first])
        bad(indexed("positions", i) + ": expected distinct positions, found " +
            std::to_string(step.pos[i]) + " of slot " + std::to_string(slot) + " twice");
      seen[step.pos[i] - first] = true;
    }
  }
}

void Session::check_anchors(const std::vector<Anchor>& anchors) const {
  check_range("anchors", static_cast<int64_t>(anchors.size()), 1, kMaxDecodeRows);
  const int64_t most = draft_ ? std::min(limits().draft.block_size, kMaxDecodeRows) : 1;
  std::vector<bool> seen(static_cast<size_t>(limits().slots));
  int64_t rows = 0;
  for (size_t i = 0; i < anchors.size(); ++i) {
    const Anchor& a = anchors[i];
    const std::string name = indexed("anchors", i);
    check_open(name + ": slot", a.slot);
    if (seen[a.slot]) bad(name + ": expected distinct slots" + found(a.slot) + " twice");
    seen[a.slot] = true;
    check_ids({a.id});
    if (a.block > 1 && !draft_)
      bad(name + ": block: expected 1 in a session without a draft" + found(a.block));
    check_range(name + ": block", a.block, 1, most);
    check_sampling(name + ": sampling.", a.sampling);
    check_room(name + ": block", a.slot, a.block);
    rows += a.block;
  }
  check_range("rows", rows, 1, kMaxDecodeRows);
}

void Session::reserve(Network network, Step& step) {
  Caches& caches = network == Network::Draft ? *draft_ : target_;
  const auto copy = [&](LayerKind kind, PageCopy c) {
    model_->copy_page(network, kind, c.src, c.dst);
  };
  for (const auto& [slot, n] : tokens_per_slot(step.slot))
    caches.reserve(slot, lengths_[slot], n, copy);
  step.global_table = &caches.table(LayerKind::Global);
  step.sliding_table = &caches.table(LayerKind::Sliding);
}

void Session::run_forward(Step& step, const std::vector<int64_t>& rows,
                          const std::vector<float*>& out) {
  Transaction transaction(*this);
  step.tap = draft_.has_value();
  reserve(Network::Target, step);
  model_->embed(step.ids, embeds_);
  forward_rows(step, rows, out);
  keep(step, real_rows(step));
  transaction.done();
}

// A forward gives at most max_rows rows; more of them repeat it, which rewrites the same K and V.
void Session::forward_rows(const Step& step, const std::vector<int64_t>& rows,
                           const std::vector<float*>& out) {
  const size_t max_rows = static_cast<size_t>(limits().max_rows);
  size_t begin = 0;
  do {
    const size_t end = std::min(rows.size(), begin + max_rows);
    model_->forward(embeds_, step, {rows.begin() + begin, rows.begin() + end},
                    {out.begin() + begin, out.begin() + end});
    begin = end;
  } while (begin < rows.size());
  for (size_t i = 0; i < rows.size(); ++i)
    if (!all_finite(out[i], limits().vocab_size))
      throw std::runtime_error("logits: row " + std::to_string(rows[i]) + " (slot " +
                               std::to_string(step.slot[rows[i]]) + ", position " +
                               std::to_string(step.pos[rows[i]]) + ") is not finite");
}

void Session::roll_back(int64_t slot, int64_t length) {
  target_.truncate(slot, length);
  if (draft_) draft_->truncate(slot, length);
  lengths_[slot] = length;
}

void Session::poll() const {
  if (check_interrupt_) check_interrupt_();
}

}  // namespace glimmer
