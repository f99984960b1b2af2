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

#include "model.h"
#include "page_pool.h"

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

enum class StopReason : uint8_t { Length, StopId, Callback };

struct GenerateResult {
  std::vector<int64_t> ids;  // every sampled id, a stop id included
  StopReason stop_reason = StopReason::Length;
  int64_t prefill_tokens = 0;
  double prefill_seconds = 0;
  int64_t decode_tokens = 0;
  double decode_seconds = 0;
};

class Session {
 public:
  using Rows = std::optional<std::vector<int64_t>>;
  using Positions = std::optional<std::vector<int64_t>>;
  using Callback = std::function<bool(int64_t id)>;  // true: go on

  // page_seed hands pages out in a random order: results must not depend on it.
  explicit Session(std::shared_ptr<Model> model, std::optional<uint64_t> page_seed = {});

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
  // Prefill of all ids but the last, then decode from that one. The last sampled id is not yet
  // part of the slot's sequence: continue with it.
  GenerateResult generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                          const SamplingParams& sampling, const std::vector<int64_t>& stop_ids,
                          int64_t chunk, const Callback& callback = {});

  void truncate(int64_t slot, int64_t length);
  void share(int64_t src, int64_t dst, int64_t n);
  int64_t length(int64_t slot) const;
  std::vector<int32_t> table(LayerKind kind) const;  // [slots, max_pages]
  int64_t pages_in_use(LayerKind kind) const;

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
  class Busy;
  class Transaction;

  const PagePool& pages(LayerKind kind) const {
    return kind == LayerKind::Global ? global_ : sliding_;
  }
  void check_generate(int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                      const SamplingParams& sampling, int64_t chunk) const;
  void check_open(const std::string& argument, int64_t slot) const;
  void check_ids(const std::vector<int64_t>& ids) const;
  void check_room(const std::string& argument, int64_t slot, int64_t n) const;
  void check_pages(int64_t slot, int64_t n, int64_t chunk) const;
  void check_step(const Step& step) const;
  Step make_step(const std::vector<Token>& tokens, const Positions& positions) const;
  Step chunk_step(int64_t slot, const std::vector<int64_t>& ids, int64_t begin, int64_t end) const;
  void reserve(const Step& step);
  void commit(const Step& step);
  void forward_rows(const Step& step, const std::vector<int64_t>& rows,
                    const std::vector<float*>& out);
  void run_forward(Step& step, const std::vector<int64_t>& rows, const std::vector<float*>& out);
  void prefill_chunks(int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
                      const std::vector<int64_t>& rows, Logits& logits);
  void roll_back(int64_t slot, int64_t length);
  void poll() const;

  std::shared_ptr<Model> model_;
  Attachment attachment_;
  PagePool global_;
  PagePool sliding_;
  std::vector<int64_t> lengths_;
  std::vector<bool> open_;
  std::vector<float> embeds_;
  std::function<void()> check_interrupt_;
  mutable std::atomic<bool> busy_{false};
};

}  // namespace glimmer
