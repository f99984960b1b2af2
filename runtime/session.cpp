// Steps of a decoding session: validation, pages, the model's call, and undo.
#include "session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace glimmer {
namespace {

constexpr LayerKind kKinds[] = {LayerKind::Global, LayerKind::Sliding};

[[noreturn]] void bad(const std::string& message) {
  throw std::invalid_argument(message);
}

std::string found(int64_t value) {
  return ", found " + std::to_string(value);
}

void check_range(const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    bad(name + ": expected a value in [" + std::to_string(low) + ", " + std::to_string(high) + "]" +
        found(value));
}

std::string indexed(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

PagePool make_pool(const ModelLimits& limits, LayerKind kind, std::optional<uint64_t> seed) {
  const bool sliding = kind == LayerKind::Sliding;
  PagePool::Config config;
  config.name = sliding ? "sliding pages" : "global pages";
  config.pages = limits.has(kind) ? (sliding ? limits.sliding_pages : limits.global_pages) : 0;
  config.slots = limits.slots;
  config.max_pages = limits.max_pages();
  config.page_size = limits.page_size;
  config.window = sliding ? limits.window : 0;
  config.seed = seed;
  return PagePool(config);
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

void check_sampling(const std::string& name, const SamplingParams& p) {
  const auto number = [](double v) { return ", found " + std::to_string(v); };
  if (!(p.temperature >= 0 && std::isfinite(static_cast<float>(p.temperature))))
    bad(name + "temperature: expected a finite float32 >= 0" + number(p.temperature));
  if (p.top_k < 0) bad(name + "top_k: expected a value >= 0" + found(p.top_k));
  if (!(p.top_p > 0 && p.top_p <= 1))
    bad(name + "top_p: expected a value in (0, 1]" + number(p.top_p));
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

}  // namespace

void check_limits(const ModelLimits& l) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check_range("vocab_size", l.vocab_size, 1, kMax);
  check_range("max_seq_len", l.max_seq_len, 1, kMax);
  check_range("max_chunk", l.max_chunk, 1, l.max_seq_len);
  check_range("max_rows", l.max_rows, 1, l.max_chunk);
  check_range("slots", l.slots, 1, kMax);
  check_range("page_size", l.page_size, 1, kMax);
  check_range("window", l.window, 0, kMax);
  check_range("n_layers", l.n_layers(), 1, kMax);
  for (int64_t i = 0; i < l.n_layers(); ++i)
    check_range(indexed("sliding_layers", i), l.sliding_layers[i], 0, 1);
  if (l.has(LayerKind::Global)) check_range("global_pages", l.global_pages, 1, kMax);
  if (l.has(LayerKind::Sliding)) {
    check_range("sliding_pages", l.sliding_pages, 1, kMax);
    check_range("window", l.window, 1, kMax);
  } else if (l.window != 0) {
    bad("window: expected 0 for a model without sliding layers" + found(l.window));
  }
}

Session::Attachment::Attachment(Model& model) : model_(model) {
  if (model_.attached.exchange(true))
    bad("model: expected one that no session uses, found one in use");
}

// Refuses a call that starts while another one runs: from another thread, or from the model.
class Session::Busy {
 public:
  explicit Busy(const Session& session) : busy_(session.busy_) {
    if (busy_.exchange(true))
      throw std::runtime_error("session: expected one call at a time, found another one running");
  }
  ~Busy() { busy_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  std::atomic<bool>& busy_;
};

// Restores tables and lengths unless the step is done.
class Session::Transaction {
 public:
  explicit Transaction(Session& s)
      : session_(s), global_(s.global_), sliding_(s.sliding_), lengths_(s.lengths_) {}
  ~Transaction() {
    if (done_) return;
    session_.global_ = std::move(global_);
    session_.sliding_ = std::move(sliding_);
    session_.lengths_ = std::move(lengths_);
  }
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void done() { done_ = true; }

 private:
  Session& session_;
  PagePool global_;
  PagePool sliding_;
  std::vector<int64_t> lengths_;
  bool done_ = false;
};

Session::Session(std::shared_ptr<Model> model, std::optional<uint64_t> page_seed)
    : model_(check_model(model)),
      attachment_(*model_),
      global_(make_pool(limits(), LayerKind::Global, page_seed)),
      sliding_(make_pool(limits(), LayerKind::Sliding, page_seed)),
      lengths_(static_cast<size_t>(limits().slots)),
      open_(static_cast<size_t>(limits().slots)) {}

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
  global_.release(slot);
  sliding_.release(slot);
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
  if (limits().has(LayerKind::Global)) global_.share(src, dst, n);
  if (limits().has(LayerKind::Sliding)) sliding_.share(src, dst, n);
  lengths_[dst] = n;
  transaction.done();
}

int64_t Session::length(int64_t slot) const {
  Busy busy(*this);
  check_open("slot", slot);
  return lengths_[slot];
}

std::vector<int32_t> Session::table(LayerKind kind) const {
  Busy busy(*this);
  return pages(kind).table();
}

int64_t Session::pages_in_use(LayerKind kind) const {
  Busy busy(*this);
  return pages(kind).used_pages();
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
    const bool possible = !limits().has(LayerKind::Sliding) || sliding_.can_truncate(slot, start);
    if (possible) roll_back(slot, start);
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
  reserve(step);
  step.global_table = &global_.table();
  step.sliding_table = &sliding_.table();
  const std::vector<int64_t> next = model_->decode(step, sampling);
  if (next.size() != tokens.size())
    throw std::runtime_error("decode: expected " + std::to_string(tokens.size()) + " ids" +
                             found(static_cast<int64_t>(next.size())));
  for (size_t i = 0; i < next.size(); ++i)
    if (step.slot[i] >= 0 && (next[i] < 0 || next[i] >= limits().vocab_size))
      throw std::runtime_error("decode: row " + std::to_string(i) + " of slot " +
                               std::to_string(step.slot[i]) + ": expected an id in [0, " +
                               std::to_string(limits().vocab_size) + ")" + found(next[i]) +
                               ": its logits are not finite");
  commit(step);
  transaction.done();
  return next;
}

GenerateResult Session::generate(int64_t slot, const std::vector<int64_t>& ids,
                                 int64_t max_new_tokens, const SamplingParams& sampling,
                                 const std::vector<int64_t>& stop_ids, int64_t chunk,
                                 const Callback& callback) {
  check_generate(slot, ids, max_new_tokens, sampling, chunk);
  const int64_t n = static_cast<int64_t>(ids.size());

  GenerateResult result;
  auto start = std::chrono::steady_clock::now();
  if (n > 1) {
    prefill(slot, std::vector<int64_t>(ids.begin(), ids.end() - 1), chunk, std::vector<int64_t>{});
    result.prefill_tokens = n - 1;
    result.prefill_seconds = seconds_since(start);
  }
  start = std::chrono::steady_clock::now();
  int64_t id = ids.back();
  while (result.decode_tokens < max_new_tokens) {
    poll();
    id = decode({{slot, id}}, {sampling})[0];
    result.ids.push_back(id);
    ++result.decode_tokens;
    const bool go_on = !callback || callback(id);
    if (std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) {
      result.stop_reason = StopReason::StopId;
      break;
    }
    if (!go_on) {
      result.stop_reason = StopReason::Callback;
      break;
    }
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

void Session::check_generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                             const SamplingParams& sampling, int64_t chunk) const {
  Busy busy(*this);
  const int64_t n = static_cast<int64_t>(ids.size());
  check_open("slot", slot);
  check_ids(ids);
  check_range("chunk", chunk, 1, limits().max_chunk);
  check_sampling("sampling.", sampling);
  check_room("ids", slot, n);
  // The last sampled id needs no position
  check_range("max_new_tokens", max_new_tokens, 1, limits().max_seq_len - lengths_[slot] - n + 1);
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
  for (LayerKind kind : kKinds) {
    if (!limits().has(kind)) continue;
    PagePool rehearsal = pages(kind);
    for (int64_t begin = 0; begin < n; begin += chunk) {
      const int64_t size = std::min(chunk, n - begin);
      rehearsal.reserve(slot, lengths_[slot] + begin, size);
      rehearsal.commit(slot, size);
    }
  }
}

Step Session::chunk_step(int64_t slot, const std::vector<int64_t>& ids, int64_t begin,
                         int64_t end) const {
  Step step;
  step.ids.assign(ids.begin() + begin, ids.begin() + end);
  step.slot.assign(static_cast<size_t>(end - begin), slot);
  for (int64_t i = begin; i < end; ++i) step.pos.push_back(lengths_[slot] + i - begin);
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

void Session::reserve(const Step& step) {
  for (const auto& [slot, n] : tokens_per_slot(step.slot)) {
    for (LayerKind kind : kKinds) {
      if (!limits().has(kind)) continue;
      PagePool& pool = kind == LayerKind::Global ? global_ : sliding_;
      for (const PageCopy& copy : pool.reserve(slot, lengths_[slot], n))
        model_->copy_page(kind, copy.src, copy.dst);
    }
  }
}

void Session::commit(const Step& step) {
  for (const auto& [slot, n] : tokens_per_slot(step.slot)) {
    if (limits().has(LayerKind::Global)) global_.commit(slot, n);
    if (limits().has(LayerKind::Sliding)) sliding_.commit(slot, n);
    lengths_[slot] += n;
  }
}

void Session::run_forward(Step& step, const std::vector<int64_t>& rows,
                          const std::vector<float*>& out) {
  Transaction transaction(*this);
  reserve(step);
  step.global_table = &global_.table();
  step.sliding_table = &sliding_.table();
  model_->embed(step.ids, embeds_);
  forward_rows(step, rows, out);
  commit(step);
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
  if (limits().has(LayerKind::Global)) global_.truncate(slot, length);
  if (limits().has(LayerKind::Sliding)) sliding_.truncate(slot, length);
  lengths_[slot] = length;
}

void Session::poll() const {
  if (check_interrupt_) check_interrupt_();
}

}  // namespace glimmer
