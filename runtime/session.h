// A decoding session: sequences ("slots") that share a model's page pools. It owns the page
// tables, gives every token its position, and undoes a step that fails: lengths and tables are
// then as before it. One call at a time; a second one is refused.
//
// Errors: std::invalid_argument for an argument, std::runtime_error for a lack of pages or slots
// and for what the model does wrong.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block_policy.h"
#include "model.h"

namespace glimmer {

struct Token {
  int64_t slot;  // -1: a padding row
  int64_t id;
};

struct Logits {
  int64_t rows = 0;
  int64_t vocab_size = 0;
  std::vector<float> data;  // [rows, vocab_size]
};

// One slot's part of a speculative step.
struct Anchor {
  int64_t slot;
  int64_t id;     // the last token, not yet part of the slot's sequence
  int64_t block;  // rows to verify: the anchor and block - 1 drafted tokens; 1: plain decoding
  SamplingParams sampling;
};

struct PassSeconds {
  double draft = 0;
  double verify = 0;
  double inject = 0;  // the draft's keys and values of what was accepted

  double total() const { return draft + verify + inject; }
};

// How generate() speculates. block: tokens of a block, 0 to choose each from what passes cost and
// how many drafts were accepted.
struct Speculation {
  int64_t block = 0;
};

struct SpeculationStats {
  int64_t passes = 0;   // steps of the target; each gives a token and the accepted drafts
  int64_t drafted = 0;  // tokens proposed
  int64_t accepted = 0;
  std::vector<int64_t> passes_by_block;     // [block_size + 1]
  std::vector<int64_t> passes_by_accepted;  // [block_size]; of passes with drafts
  std::vector<double> seconds_by_block;     // [block_size + 1]: the least of the last few, or 0
  PassSeconds seconds;                      // in all
};

enum class StopReason : uint8_t { Length, StopId, Callback };

struct GenerateResult {
  std::vector<int64_t> ids;  // every sampled id, a stop id included
  StopReason stop_reason = StopReason::Length;
  int64_t prefill_tokens = 0;
  double prefill_seconds = 0;
  int64_t decode_tokens = 0;
  double decode_seconds = 0;
  std::optional<SpeculationStats> speculation;
};

// Throws std::invalid_argument, naming the parameter after `name`.
void check_sampling(const std::string& name, const SamplingParams& sampling);

class Session {
 public:
  using Rows = std::optional<std::vector<int64_t>>;
  using Positions = std::optional<std::vector<int64_t>>;
  using Callback = std::function<bool(int64_t id)>;  // true: go on

  // page_seed hands pages out in a random order: results must not depend on it. With `draft` every
  // step also makes the keys and values of the model's draft model, for speculate().
  explicit Session(std::shared_ptr<Model> model, std::optional<uint64_t> page_seed = {},
                   bool draft = false);

  int64_t open();
  void close(int64_t slot);

  // Appends ids to a slot, `chunk` tokens a forward, and returns the logits of `rows` (indices
  // into ids, in this order; by default the last). When a forward fails, the slot is rolled back
  // to where it was; if its window no longer allows that, it keeps the chunks that succeeded.
  Logits prefill(int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
                 const Rows& rows = {});
  // One step over several slots: each slot's tokens continue its sequence in order, or at
  // `positions`, which must then be a permutation of those.
  Logits forward(const std::vector<Token>& tokens, const std::vector<int64_t>& rows,
                 const Positions& positions = {});
  // One step of at most 16 rows; returns the sampled next id of each. Several rows of one slot
  // are drafts to verify: truncate() what is rejected. A padding row's id means nothing.
  std::vector<int64_t> decode(const std::vector<Token>& tokens,
                              const std::vector<SamplingParams>& sampling);
  // One speculative step over distinct slots, of at most 16 rows: drafts, verifies, and extends
  // each slot by its anchor and the accepted drafts. Returns for each the tokens that plain
  // decoding would sample after its anchor: 1 + accepted, of which the last is not yet part of the
  // sequence. The text does not depend on blocks or drafts.
  std::vector<std::vector<int64_t>> speculate(const std::vector<Anchor>& anchors,
                                              PassSeconds* seconds = nullptr);
  // Prefill of all ids but the last, then decode from that one. The last sampled id is not yet
  // part of the slot's sequence: continue with it.
  GenerateResult generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                          const SamplingParams& sampling, const std::vector<int64_t>& stop_ids,
                          int64_t chunk, const Callback& callback = {},
                          const std::optional<Speculation>& speculation = {});

  void truncate(int64_t slot, int64_t length);
  void share(int64_t src, int64_t dst, int64_t n);
  int64_t length(int64_t slot) const;
  // The most rows that the slot's next step has positions and pages for.
  int64_t room(int64_t slot) const;
  std::vector<int32_t> table(Network network, LayerKind kind) const;  // [slots, max_pages]
  int64_t pages_in_use(Network network, LayerKind kind) const;
  bool drafts() const { return draft_.has_value(); }

  Model& model() const { return *model_; }
  const ModelLimits& limits() const { return model_->limits(); }

  // Called between steps; may throw to interrupt.
  void set_interrupt_check(std::function<void()> check) { check_interrupt_ = std::move(check); }

 private:
  // Two sessions on one model would write each other's pages.
  class Attachment {
   public:
    explicit Attachment(Model& model);
    ~Attachment() { model_.attached = false; }
    Attachment(const Attachment&) = delete;
    Attachment& operator=(const Attachment&) = delete;

   private:
    Model& model_;
  };
  // Refuses a call that starts while another one runs: from another thread, or from the model.
  class Busy {
   public:
    explicit Busy(const Session& session);
    ~Busy() { busy_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    std::atomic<bool>& busy_;
  };
  class Transaction;

  const Caches& caches(Network network) const;
  void check_generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                      const SamplingParams& sampling, int64_t chunk,
                      const std::optional<Speculation>& speculation) const;
  void check_open(const std::string& argument, int64_t slot) const;
  void check_ids(const std::vector<int64_t>& ids) const;
  void check_room(const std::string& argument, int64_t slot, int64_t n) const;
  void check_pages(int64_t slot, int64_t n, int64_t chunk) const;
  void check_step(const Step& step) const;
  void check_anchors(const std::vector<Anchor>& anchors) const;
  Step make_step(const std::vector<Token>& tokens, const Positions& positions) const;
  Step chunk_step(int64_t slot, const std::vector<int64_t>& ids, int64_t begin, int64_t end) const;
  void reserve(Network network, Step& step);
  void keep(const Step& step, const std::vector<int64_t>& rows);
  void forward_rows(const Step& step, const std::vector<int64_t>& rows,
                    const std::vector<float*>& out);
  void run_forward(Step& step, const std::vector<int64_t>& rows, const std::vector<float*>& out);
  void check_sampled(const std::string& method, const Step& step,
                     const std::vector<int64_t>& ids) const;
  std::vector<int64_t> run_decode(Step& step, const std::vector<SamplingParams>& sampling);
  std::vector<std::vector<int64_t>> draft_blocks(const std::vector<Anchor>& anchors);
  void prefill_chunks(int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
                      const std::vector<int64_t>& rows, Logits& logits);
  bool deliver(int64_t slot, const std::vector<int64_t>& ids, const std::vector<int64_t>& stop_ids,
               const Callback& callback, GenerateResult& result);
  void roll_back(int64_t slot, int64_t length);
  void poll() const;

  std::shared_ptr<Model> model_;
  Attachment attachment_;
  Caches target_;
  std::optional<BlockPolicy> policy_;  // with a draft
  std::optional<Caches> draft_;        // holds the same tokens as target_, but during a step
  std::vector<int64_t> lengths_;
  std::vector<bool> open_;
  std::vector<float> embeds_;
  std::function<void()> check_interrupt_;
  mutable std::atomic<bool> busy_{false};
};

}  // namespace glimmer
