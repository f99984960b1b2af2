// What a session needs of a model, whoever implements it: an ExecuTorch program (program.h) or
// Python. A failing call throws; the session then undoes the step.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "caches.h"
#include "glimmer/tensor.h"
#include "trace.h"

namespace glimmer {

// Whose layers: the model's own, or those of the DFlash draft model that came with it.
enum class Network : uint8_t { Target, Draft };

constexpr int64_t kMaxDecodeRows = 16;

struct DraftLimits : CacheLimits {
  int64_t block_size = 0;  // most tokens of a block; 0: there is no draft model
  int64_t mask_token_id = 0;
};

struct ModelLimits : CacheLimits {
  int64_t vocab_size = 0;
  int64_t max_seq_len = 0;  // tokens of one sequence
  int64_t max_chunk = 0;    // tokens of one forward
  int64_t max_rows = 0;     // rows of logits of one forward
  int64_t slots = 0;        // sequences held at once
  int64_t page_size = 0;
  DraftLimits draft;

  int64_t max_pages() const { return (max_seq_len + page_size - 1) / page_size; }
  bool has_draft() const { return draft.block_size > 0; }
  const CacheLimits& caches(Network network) const {
    if (network == Network::Draft) return draft;
    return *this;
  }
};

// Throws std::invalid_argument, naming the limit, unless a session can work with them.
void check_limits(const ModelLimits& limits);

struct SamplingParams {
  double temperature = 0;  // 0: the most probable token
  int64_t top_k = 0;       // 0: no limit
  double top_p = 1;
  int64_t seed = 0;
};

// The flat axis of one step, and the page tables [slots, max_pages] of the network that runs it.
// Slot -1 is a padding row.
struct Step {
  std::vector<int64_t> ids;  // empty where only keys and values are made
  std::vector<int64_t> pos;
  std::vector<int64_t> slot;
  const std::vector<int32_t>* global_table = nullptr;
  const std::vector<int32_t>* sliding_table = nullptr;
  bool tap = false;  // keep what inject() needs of every row, until the next such step

  int64_t size() const { return static_cast<int64_t>(pos.size()); }
};

class Model {
 public:
  explicit Model(ModelLimits limits) : limits_(std::move(limits)) {}
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelLimits& limits() const { return limits_; }

  // float32 [T, D] for T = ids.size(), into `embeds`.
  virtual void embed(const std::vector<int64_t>& ids, std::vector<float>& embeds) = 0;
  // Writes the K and V of every token and the logits of token rows[i] to out[i], vocab_size each.
  virtual void forward(const std::vector<float>& embeds, const Step& step,
                       const std::vector<int64_t>& rows, const std::vector<float*>& out) = 0;
  // The sampled next id of every row, with step = pos; -1 for a row whose logits are not finite.
  virtual std::vector<int64_t> decode(const Step& step,
                                      const std::vector<SamplingParams>& sampling) = 0;
  // Writes the draft's K and V of the given rows of the last step with `tap`, at step's positions.
  virtual void inject(const Step&, const std::vector<int64_t>& /*rows*/) { no_draft(); }
  // Writes the draft's K and V of a block, anchor and masks, and gives the sampled token at each
  // row's own position, with step = pos - 1; an anchor's means nothing. -1 as decode's.
  virtual std::vector<int64_t> draft(const Step&, const std::vector<SamplingParams>&) {
    no_draft();
  }
  // Copies one page of K and V in every layer of the kind.
  virtual void copy_page(Network network, LayerKind kind, int64_t src, int64_t dst) = 0;
  // [pages, kv_heads, page_size, head_dim] of one layer; part is 'k' or 'v'.
  virtual Tensor pool(Network network, int64_t layer, char part) = 0;
  // What the calls since the last take reported, if the model was loaded with a trace.
  virtual Trace take_trace() {
    throw std::runtime_error("model: expected one loaded with a trace");
  }

  std::atomic<bool> attached{false};  // a session uses this model

 protected:
  [[noreturn]] static void no_draft() {
    throw std::runtime_error("model: expected one with a draft model");
  }

  ModelLimits limits_;
};

}  // namespace glimmer
