// Loads an exported program and runs its methods on ExecuTorch.
//
// The operators that are not ours (index_select and the like) must be registered in the process
// before, by loading libexecutorch_kernels_optimized.so.
#include "program.h"

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr_maker.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "executorch_log.h"
#include "executorch_tensor.h"
#include "flat_tensor.h"
#include "op_call.h"
#include "tracers.h"

namespace glimmer {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using EtTensor = executorch::aten::Tensor;

constexpr const char* kEmbed = "embed_text";
constexpr const char* kForward = "forward_from_embeddings";
constexpr const char* kDecode = "decode";
constexpr const char* kTargetForward = "target_forward_from_embeddings";
constexpr const char* kTargetDecode = "target_decode";
constexpr const char* kDraftPrefill = "draft_prefill";
constexpr const char* kDraftForward = "draft_forward";
constexpr const char* kMethods[] = {kEmbed, kForward, kDecode};
constexpr const char* kDraftMethods[] = {kTargetForward, kTargetDecode, kDraftPrefill,
                                         kDraftForward};

[[noreturn]] void bad_file(const std::string& path, const std::string& message) {
  throw std::invalid_argument(path + ": " + message);
}

[[noreturn]] void bad_program(const std::string& message) {
  throw std::runtime_error("program: " + message);
}

constexpr size_t kHeadBytes = 64;

std::vector<char> read_head(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::vector<char> head(kHeadBytes);
  if (!in.read(head.data(), kHeadBytes)) bad_file(path, "cannot be read");
  return head;
}

template <class T>
T read_le(const std::vector<char>& head, size_t offset) {
  T value;
  std::memcpy(&value, head.data() + offset, sizeof value);
  return value;
}

// An ExecuTorch program: flatbuffer identifier "ET12" at byte 4; an extended header at byte 8:
// magic "eh00", its length, program size, segment base offset, and in newer files segment size.
void check_pte(const std::string& path) {
  const uint64_t size = checked_file_size(path);
  if (size < kHeadBytes)
    bad_file(path, "expected an ExecuTorch program, found " + std::to_string(size) + " bytes");
  const std::vector<char> head = read_head(path);
  if (std::memcmp(head.data() + 4, "ET", 2) != 0 || std::memcmp(head.data() + 8, "eh00", 4) != 0)
    bad_file(path, "expected an ExecuTorch program, found another kind of file");
  check_extent(path, size, 0, read_le<uint64_t>(head, 16));
  const uint64_t base = read_le<uint64_t>(head, 24);
  const bool has_segment_size = read_le<uint32_t>(head, 12) >= 32;
  check_extent(path, size, base, has_segment_size ? read_le<uint64_t>(head, 32) : 0);
}

std::string hex16(uint64_t id) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(id));
  return text;
}

// Every key of our data files starts with weights_<id>.
void check_weights_id(const std::string& path, const std::vector<std::string>& keys, uint64_t id) {
  const std::string prefix = "weights_", expected = hex16(id);
  for (const std::string& key : keys) {
    if (key.rfind(prefix + expected + ".", 0) == 0) continue;
    const bool ours = key.rfind(prefix, 0) == 0 && key.size() > prefix.size() + 16;
    bad_file(path, "holds weights " + (ours ? key.substr(prefix.size(), 16) : "'" + key + "'") +
                       ", expected " + expected);
  }
}

Tensor to_tensor(const std::string& name, const EtTensor& t) {
  Tensor out;
  out.name = name.c_str();
  const Status status = to_tensor(t, out);
  if (!status.ok()) bad_program(status.message());
  out.name = "";
  return out;
}

// Module keeps its methods to itself, but a subclass may ask them for their attributes.
class OpenModule : public Module {
 public:
  using Module::Module;
  et::Method& loaded(const std::string& name) { return *methods_.at(name).method; }
};

class ProgramModel : public Model {
 public:
  // keys: those of the data file
  ProgramModel(const std::string& pte, const std::string& ptd, const std::vector<std::string>& keys,
               TraceKind trace)
      : Model({}),
        module_(pte, ptd.empty() ? std::vector<std::string>{} : std::vector<std::string>{ptd},
                Module::LoadMode::Mmap, make_tracer(trace, tracer_), nullptr, nullptr,
                /*share_memory_arenas=*/true) {
    LogCapture log;
    if (module_.load(et::Program::Verification::InternalConsistency) != et::Error::Ok)
      bad_file(pte, "is damaged: " + log.take());
    read_limits();
    check_weights(pte, ptd, keys);
    for (const char* method : kMethods) load(method, log);
    check_tables({{kForward, 3}, {kDecode, 3}});
    find_pools(Network::Target, {kForward, kDecode});
    if (limits_.has_draft()) load_draft(log);
    if (tracer_) tracer_->take();  // what loading reported
  }

  Trace take_trace() override { return tracer_ ? tracer_->take() : Model::take_trace(); }

  void embed(const std::vector<int64_t>& ids, std::vector<float>& embeds) override {
    const int64_t n = static_cast<int64_t>(ids.size());
    const EtTensor out = execute(kEmbed, {blob(ids, {n})})[0];
    expect_output(kEmbed, out, ScalarType::Float, {n, dim_});
    const float* data = out.const_data_ptr<float>();
    embeds.assign(data, data + n * dim_);
  }

  void forward(const std::vector<float>& embeds, const Step& step, const std::vector<int64_t>& rows,
               const std::vector<float*>& out) override {
    const int64_t n = step.size(), r = static_cast<int64_t>(rows.size());
    const int64_t vocab = limits_.vocab_size;
    const char* method = step.tap ? kTargetForward : kForward;
    const std::vector<EtTensor> outs =
        execute(method, {blob(embeds, {n, dim_}), blob(step.pos, {n}), blob(step.slot, {n}),
                         table(*step.global_table), table(*step.sliding_table), blob(rows, {r})});
    const EtTensor& logits = outs[0];
    expect_output(method, logits, ScalarType::Float, {r, vocab});
    for (int64_t i = 0; i < r; ++i)
      std::memcpy(out[i], logits.const_data_ptr<float>() + i * vocab,
                  static_cast<size_t>(vocab) * sizeof(float));
    if (step.tap) keep_taps(method, outs, n);
  }

  std::vector<int64_t> decode(const Step& step,
                              const std::vector<SamplingParams>& sampling) override {
    const int64_t n = step.size();
    const char* method = step.tap ? kTargetDecode : kDecode;
    const Sampling how(sampling);
    const std::vector<EtTensor> outs = execute(method, sampled_inputs(step, how));
    expect_output(method, outs[0], ScalarType::Long, {n});
    if (step.tap) keep_taps(method, outs, n);
    const int64_t* data = outs[0].const_data_ptr<int64_t>();
    return {data, data + n};
  }

  void inject(const Step& step, const std::vector<int64_t>& rows) override {
    const int64_t n = step.size();
    injected_.clear();
    for (int64_t row : rows)
      injected_.insert(injected_.end(), taps_.begin() + row * taps_width_,
                       taps_.begin() + (row + 1) * taps_width_);
    execute(kDraftPrefill,
            {blob(injected_, {n, taps_width_}), blob(step.pos, {n}), blob(step.slot, {n}),
             table(*step.global_table), table(*step.sliding_table)});
  }

  std::vector<int64_t> draft(const Step& step,
                             const std::vector<SamplingParams>& sampling) override {
    const int64_t n = step.size();
    const Sampling how(sampling);
    std::vector<int64_t> before;
    for (int64_t pos : step.pos) before.push_back(pos - 1);
    std::vector<TensorPtr> inputs = sampled_inputs(step, how);
    inputs.push_back(blob(before, {n}));
    const EtTensor ids = execute(kDraftForward, inputs)[0];
    expect_output(kDraftForward, ids, ScalarType::Long, {n});
    const int64_t* data = ids.const_data_ptr<int64_t>();
    return {data, data + n};
  }

  void copy_page(Network network, LayerKind kind, int64_t src, int64_t dst) override {
    const CacheLimits& caches = limits_.caches(network);
    for (int64_t layer = 0; layer < caches.n_layers(); ++layer) {
      if ((caches.sliding_layers[layer] != 0) != (kind == LayerKind::Sliding)) continue;
      for (char part : {'k', 'v'}) {
        const Tensor t = pool(network, layer, part);
        const int64_t bytes = t.nbytes() / t.size(0);
        std::memcpy(t.ptr<char>() + dst * bytes, t.ptr<char>() + src * bytes,
                    static_cast<size_t>(bytes));
      }
    }
  }

  Tensor pool(Network network, int64_t layer, char part) override {
    const auto& pools = network == Network::Draft ? draft_pools_ : pools_;
    return pools.at(static_cast<size_t>(2 * layer + (part == 'v')));
  }

 private:
  [[noreturn]] void fail(const std::string& what, et::Error error, LogCapture& log) {
    std::string message = what + " (" + et::to_string(error) + ")";
    const std::string op = take_op_error(), logged = log.take();  // the log repeats the op's error
    if (!op.empty() || !logged.empty()) message += ": " + (op.empty() ? logged : op);
    bad_program(message);
  }

  // One vector an input of `sample`.
  struct Sampling {
    explicit Sampling(const std::vector<SamplingParams>& rows) {
      for (const SamplingParams& p : rows) {
        temperature.push_back(static_cast<float>(p.temperature));
        top_k.push_back(p.top_k);
        top_p.push_back(static_cast<float>(p.top_p));
        seed.push_back(p.seed);
      }
    }
    std::vector<float> temperature, top_p;
    std::vector<int64_t> top_k, seed;
  };

  std::vector<TensorPtr> sampled_inputs(const Step& step, const Sampling& how) const {
    const int64_t n = step.size();
    return {blob(step.ids, {n}),       blob(step.pos, {n}),        blob(step.slot, {n}),
            table(*step.global_table), table(*step.sliding_table), blob(how.temperature, {n}),
            blob(how.top_k, {n}),      blob(how.top_p, {n}),       blob(how.seed, {n})};
  }

  // The next call overwrites the outputs of this one.
  void keep_taps(const char* method, const std::vector<EtTensor>& outs, int64_t n) {
    if (outs.size() != 2) bad_program(std::string(method) + ": expected two outputs");
    expect_output(method, outs[1], ScalarType::Float, {n, taps_width_});
    const float* data = outs[1].const_data_ptr<float>();
    taps_.assign(data, data + n * taps_width_);
  }

  // The outputs, all tensors, valid until the next call: methods share their memory.
  std::vector<EtTensor> execute(const char* method, const std::vector<TensorPtr>& inputs) {
    LogCapture log;
    take_op_error();
    if (tracer_) tracer_->set_method(method);
    const std::vector<et::EValue> values(inputs.begin(), inputs.end());
    const auto result = module_.execute(method, values);
    if (!result.ok()) fail(std::string(method) + " failed", result.error(), log);
    std::vector<EtTensor> outs;
    for (const et::EValue& value : *result)
      if (value.isTensor()) outs.push_back(value.toTensor());
    if (outs.empty() || outs.size() != result->size())
      bad_program(std::string(method) + ": expected tensors as outputs");
    return outs;
  }

  // Inputs have no memory of their own in the program: the vectors must outlive the call.
  template <class T>
  static TensorPtr blob(const std::vector<T>& data, const std::vector<int64_t>& sizes) {
    static T nothing{};
    constexpr ScalarType type = std::is_same_v<T, float>     ? ScalarType::Float
                                : std::is_same_v<T, int32_t> ? ScalarType::Int
                                                             : ScalarType::Long;
    return from_blob(data.empty() ? &nothing : const_cast<T*>(data.data()),
                     {sizes.begin(), sizes.end()}, type);
  }

  TensorPtr table(const std::vector<int32_t>& data) const {
    return blob(data, {limits_.slots, limits_.max_pages()});
  }

  static void expect_output(const char* method, const EtTensor& t, ScalarType type,
                            const std::vector<int64_t>& sizes) {
    bool same = t.scalar_type() == type && t.dim() == static_cast<ssize_t>(sizes.size());
    for (size_t i = 0; same && i < sizes.size(); ++i) same = t.size(i) == sizes[i];
    if (same) return;
    Shape expected;
    expected.dtype = *to_dtype(type);
    for (int64_t size : sizes) expected.sizes[expected.ndim++] = size;
    bad_program(std::string(method) + ": expected output " + to_string(expected) + ", found " +
                to_string(to_tensor(method, t)));
  }

  et::EValue constant_value(const std::string& name) {
    LogCapture log;
    const auto result = module_.execute(name);
    if (!result.ok()) fail("constant " + name + " cannot be read", result.error(), log);
    if (result->size() != 1) bad_program("constant " + name + ": expected one value");
    return (*result)[0];
  }

  // An int, or int64 tensor of one element.
  int64_t constant(const std::string& name) {
    const et::EValue v = constant_value(name);
    if (v.isInt()) return v.toInt();
    if (v.isTensor() && v.toTensor().numel() == 1 && v.toTensor().scalar_type() == ScalarType::Long)
      return *v.toTensor().const_data_ptr<int64_t>();
    bad_program("constant " + name + ": expected an int");
  }

  std::vector<int64_t> constant_list(const std::string& name) {
    const et::EValue v = constant_value(name);
    if (!v.isTensor() || v.toTensor().scalar_type() != ScalarType::Long)
      bad_program("constant " + name + ": expected an int64 tensor");
    const int64_t* data = v.toTensor().const_data_ptr<int64_t>();
    return {data, data + v.toTensor().numel()};
  }

  void read_limits() {
    for (const char* method : kMethods) expect_method(method);
    limits_.vocab_size = constant("get_vocab_size");
    limits_.max_seq_len = constant("get_max_seq_len");
    limits_.max_chunk = constant("get_max_prefill_chunk");
    limits_.max_rows = constant("get_max_rows");
    limits_.slots = constant("get_slots");
    limits_.page_size = constant("get_page_size");
    limits_.global_pages = constant("get_global_pages");
    limits_.sliding_pages = constant("get_sliding_pages");
    limits_.window = constant("get_window");
    limits_.sliding_layers = constant_list("get_sliding_layers");
    const int64_t n_layers = constant("get_n_layers");
    if (limits_.n_layers() != n_layers)
      bad_program("get_sliding_layers: expected " + std::to_string(n_layers) + " entries, found " +
                  std::to_string(limits_.n_layers()));
    const auto has = [this](const char* method) { return has_method(method); };
    if (std::any_of(std::begin(kDraftMethods), std::end(kDraftMethods), has)) read_draft_limits();
    check_limits(limits_);
  }

  void read_draft_limits() {
    for (const char* method : kDraftMethods) expect_method(method);
    DraftLimits& draft = limits_.draft;
    draft.block_size = constant("get_block_size");
    draft.mask_token_id = constant("get_mask_token_id");
    draft.global_pages = constant("get_draft_global_pages");
    draft.sliding_pages = constant("get_draft_sliding_pages");
    draft.sliding_layers = constant_list("get_draft_sliding_layers");
    const int64_t window = constant("get_draft_sliding_window");
    draft.window = window > 0 ? window + 1 : 0;  // inclusive in the program
    if (draft.block_size < 1)
      bad_program("get_block_size: expected at least 2, found " + std::to_string(draft.block_size));
  }

  void expect_method(const char* name) {
    if (!has_method(name)) bad_program("expected a method " + std::string(name));
  }

  void load(const char* method, LogCapture& log) {
    const et::Error error = module_.load_method(method);
    if (error != et::Error::Ok) fail(std::string(method) + ": cannot be loaded", error, log);
  }

  void load_draft(LogCapture& log) {
    for (const char* method : kDraftMethods) load(method, log);
    check_tables({{kTargetForward, 3}, {kTargetDecode, 3}, {kDraftPrefill, 3}, {kDraftForward, 3}});
    find_pools(Network::Draft, {kDraftPrefill, kDraftForward});
    check_shared(Network::Target, {kTargetForward, kTargetDecode});
    const std::vector<int64_t> taps = input_sizes(kDraftPrefill, 0);
    if (taps.size() != 2) bad_program(std::string(kDraftPrefill) + ": expected taps [T, n * dim]");
    taps_width_ = taps[1];
  }

  // A program that names its weights needs exactly those.
  void check_weights(const std::string& pte, const std::string& ptd,
                     const std::vector<std::string>& keys) {
    const bool named = has_method("get_weights_id");
    if (!named && ptd.empty()) return;
    if (!named) bad_file(pte, "expected a constant get_weights_id, to compare with " + ptd);
    const uint64_t id = static_cast<uint64_t>(constant("get_weights_id"));
    if (ptd.empty())
      bad_file(pte, "expected a data file with weights " + hex16(id) + ", found none");
    check_weights_id(ptd, keys, id);
  }

  bool has_method(const std::string& name) {
    const auto names = module_.method_names();
    return names.ok() && names->count(name) != 0;
  }

  std::vector<int64_t> input_sizes(const char* method, size_t index) {
    const auto meta = module_.method_meta(method);
    if (!meta.ok()) bad_program(std::string(method) + ": cannot be read");
    const auto tensor = meta->input_tensor_meta(index);
    if (!tensor.ok())
      bad_program(std::string(method) + ": input " + std::to_string(index) + ": expected a tensor");
    return {tensor->sizes().begin(), tensor->sizes().end()};
  }

  // Each method's page tables are two of its inputs, from the given one on.
  void check_tables(const std::vector<std::pair<const char*, size_t>>& methods) {
    const std::vector<int64_t> expected = {limits_.slots, limits_.max_pages()};
    for (const auto& [method, first] : methods)
      for (size_t index : {first, first + 1})
        if (input_sizes(method, index) != expected)
          bad_program(std::string(method) + ": expected page tables [slots, max_pages] = [" +
                      std::to_string(expected[0]) + ", " + std::to_string(expected[1]) + "]");
    const std::vector<int64_t> embeds = input_sizes(kForward, 0);
    if (embeds.size() != 2) bad_program(std::string(kForward) + ": expected embeddings [T, dim]");
    dim_ = embeds[1];
  }

  Tensor attribute(const char* method, const std::string& name) {
    LogCapture log;
    const auto t = module_.loaded(method).get_attribute(name);
    if (!t.ok()) fail(std::string(method) + ": expected a mutable buffer " + name, t.error(), log);
    return to_tensor(name, *t);
  }

  static std::string pool_name(Network network, int64_t layer, char part) {
    const std::string prefix = network == Network::Draft ? "pools.draft_" : "pools.";
    return prefix + part + "_" + std::to_string(layer);
  }

  // The pools of a network, which all the methods must share.
  void find_pools(Network network, const std::vector<const char*>& methods) {
    const CacheLimits& caches = limits_.caches(network);
    auto& pools = network == Network::Draft ? draft_pools_ : pools_;
    for (int64_t layer = 0; layer < caches.n_layers(); ++layer) {
      const bool sliding = caches.sliding_layers[layer] != 0;
      const int64_t pages = sliding ? caches.sliding_pages : caches.global_pages;
      for (char part : {'k', 'v'}) {
        const std::string name = pool_name(network, layer, part);
        const Tensor t = attribute(methods[0], name);
        if (!t.data || !is_float(t.dtype) || t.ndim != 4 || t.size(0) != pages ||
            t.size(2) != limits_.page_size)
          bad_program(name + ": expected float32, float16 or bfloat16 [" + std::to_string(pages) +
                      ", kv_heads, " + std::to_string(limits_.page_size) + ", head_dim], found " +
                      to_string(t));
        pools.push_back(t);
      }
    }
    check_shared(network, methods);
  }

  void check_shared(Network network, const std::vector<const char*>& methods) {
    for (int64_t layer = 0; layer < limits_.caches(network).n_layers(); ++layer)
      for (char part : {'k', 'v'})
        for (const char* method : methods) {
          const std::string name = pool_name(network, layer, part);
          if (attribute(method, name).data != pool(network, layer, part).data)
            bad_program(name +
                        ": expected one pool for all methods, found one for each: export "
                        "with share_mutable_buffers=True");
        }
  }

  Tracer* tracer_ = nullptr;  // module_ owns it
  OpenModule module_;
  int64_t dim_ = 0;
  int64_t taps_width_ = 0;
  std::vector<Tensor> pools_;  // k and v of layer 0, of layer 1, ...
  std::vector<Tensor> draft_pools_;
  std::vector<float> taps_;  // [T, taps_width] of the last step with taps
  std::vector<float> injected_;
};

}  // namespace

std::unique_ptr<Model> load_program(const std::string& pte, const std::string& ptd,
                                    TraceKind trace) {
  install_log_filter();
  check_pte(pte);
  std::vector<std::string> keys;
  if (!ptd.empty()) keys = read_flat_tensor_keys(ptd);
  return std::make_unique<ProgramModel>(pte, ptd, keys, trace);
}

}  // namespace glimmer
