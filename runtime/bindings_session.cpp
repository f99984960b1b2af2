// Python bindings of the page pool, the session, its models and the thread pool.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "bindings.h"
#include "flat_tensor.h"
#include "page_pool.h"
#include "program.h"
#include "session.h"
#include "threads.h"

namespace py = pybind11;

namespace glimmer {
namespace {

template <class T>
py::array_t<T> to_numpy(const std::vector<T>& data, std::vector<py::ssize_t> shape) {
  return py::array_t<T>(std::move(shape), data.data());
}

template <class T>
py::array_t<T> to_numpy(const std::vector<T>& data) {
  return to_numpy(data, {static_cast<py::ssize_t>(data.size())});
}

py::array_t<int32_t> table_array(const std::vector<int32_t>& table, int64_t slots) {
  return to_numpy(table, {slots, static_cast<py::ssize_t>(table.size()) / slots});
}

// Without a copy: the array owns the vector.
py::array_t<float> logits_array(Logits&& logits) {
  auto owned = std::make_unique<Logits>(std::move(logits));
  const Logits& l = *owned;
  py::capsule owner(owned.release(), [](void* p) { delete static_cast<Logits*>(p); });
  return py::array_t<float>({l.rows, l.vocab_size}, l.data.data(), owner);
}

py::dtype numpy_dtype(DType t) {
  switch (t) {
    case DType::F32:
      return py::dtype("float32");
    case DType::F16:
      return py::dtype("float16");
    default:
      return py::dtype("uint16");  // numpy has no bfloat16
  }
}

DType pool_dtype(const py::array& array) {
  for (DType t : {DType::F32, DType::F16, DType::BF16})
    if (array.dtype().equal(numpy_dtype(t))) return t;
  throw std::runtime_error("pool: expected float32, float16 or uint16 (bfloat16), found " +
                           py::str(array.dtype()).cast<std::string>());
}

constexpr const char* kKindNames[2][2] = {{"global", "sliding"}, {"draft_global", "draft_sliding"}};

const char* kind_name(Network network, LayerKind kind) {
  return kKindNames[static_cast<int>(network)][static_cast<int>(kind)];
}

std::pair<Network, LayerKind> to_kind(const std::string& kind) {
  for (Network network : {Network::Target, Network::Draft})
    for (LayerKind k : {LayerKind::Global, LayerKind::Sliding})
      if (kind == kind_name(network, k)) return {network, k};
  throw py::value_error(
      "kind: expected 'global', 'sliding', 'draft_global' or 'draft_sliding', found '" + kind +
      "'");
}

const char* stop_reason_name(StopReason reason) {
  switch (reason) {
    case StopReason::StopId:
      return "stop_id";
    case StopReason::Callback:
      return "callback";
    default:
      return "length";
  }
}

// A model written in Python; every method takes and gives numpy arrays.
class PyModel : public Model {
 public:
  using Model::Model;

  void embed(const std::vector<int64_t>& ids, std::vector<float>& embeds) override {
    py::gil_scoped_acquire gil;
    const auto out = FloatArray::ensure(method("embed")(to_numpy(ids)));
    if (!out || out.ndim() != 2 || out.shape(0) != static_cast<py::ssize_t>(ids.size()))
      throw std::runtime_error("embed: expected float32 [" + std::to_string(ids.size()) + ", dim]");
    dim_ = out.shape(1);
    embeds.assign(out.data(), out.data() + out.size());
  }

  void forward(const std::vector<float>& embeds, const Step& step, const std::vector<int64_t>& rows,
               const std::vector<float*>& out) override {
    py::gil_scoped_acquire gil;
    const auto logits = FloatArray::ensure(method(step.tap ? "target_forward" : "forward")(
        to_numpy(embeds, {step.size(), dim_}), to_numpy(step.pos), to_numpy(step.slot),
        table(*step.global_table), table(*step.sliding_table), to_numpy(rows)));
    if (!logits || logits.ndim() != 2 || logits.shape(0) != static_cast<py::ssize_t>(rows.size()) ||
        logits.shape(1) != limits_.vocab_size)
      throw std::runtime_error("forward: expected float32 [" + std::to_string(rows.size()) + ", " +
                               std::to_string(limits_.vocab_size) + "]");
    for (size_t i = 0; i < out.size(); ++i)
      std::copy_n(logits.data(static_cast<py::ssize_t>(i), 0), limits_.vocab_size, out[i]);
  }

  std::vector<int64_t> decode(const Step& step,
                              const std::vector<SamplingParams>& sampling) override {
    py::gil_scoped_acquire gil;
    return sampled(step.tap ? "target_decode" : "decode", step, sampling);
  }

  void inject(const Step& step, const std::vector<int64_t>& rows) override {
    py::gil_scoped_acquire gil;
    method("draft_prefill")(to_numpy(rows), to_numpy(step.pos), to_numpy(step.slot),
                            table(*step.global_table), table(*step.sliding_table));
  }

  std::vector<int64_t> draft(const Step& step,
                             const std::vector<SamplingParams>& sampling) override {
    py::gil_scoped_acquire gil;
    return sampled("draft_forward", step, sampling);
  }

  void copy_page(Network network, LayerKind kind, int64_t src, int64_t dst) override {
    py::gil_scoped_acquire gil;
    method("copy_page")(kind_name(network, kind), src, dst);
  }

  Tensor pool(Network network, int64_t layer, char part) override {
    py::gil_scoped_acquire gil;
    const char* name = network == Network::Draft ? "draft_pool" : "pool";
    const auto array = method(name)(layer, std::string(1, part)).cast<py::array>();
    Tensor t;
    t.dtype = pool_dtype(array);
    if (array.ndim() != kMaxDims || !(array.flags() & py::array::c_style))
      throw std::runtime_error("pool: expected a contiguous array of 4 dimensions");
    for (t.ndim = 0; t.ndim < kMaxDims; ++t.ndim) t.sizes[t.ndim] = array.shape(t.ndim);
    t.data = const_cast<void*>(array.data());
    pools_[{network, layer, part}] = array;
    return t;
  }

 private:
  using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

  py::function method(const char* name) const {
    py::function f = py::get_override(static_cast<const Model*>(this), name);
    if (!f) throw std::runtime_error(std::string("model: expected a method ") + name);
    return f;
  }
  py::array_t<int32_t> table(const std::vector<int32_t>& t) const {
    return table_array(t, limits_.slots);
  }
  std::vector<int64_t> sampled(const char* name, const Step& step,
                               const std::vector<SamplingParams>& sampling) const {
    return method(name)(to_numpy(step.ids), to_numpy(step.pos), to_numpy(step.slot),
                        table(*step.global_table), table(*step.sliding_table), sampling)
        .cast<std::vector<int64_t>>();
  }

  int64_t dim_ = 0;
  // Alive as long as their addresses are.
  std::map<std::tuple<Network, int64_t, char>, py::array> pools_;
};

TraceKind to_trace_kind(const std::string& kind) {
  if (kind.empty()) return TraceKind::None;
  if (kind == "times") return TraceKind::Times;
  if (kind == "outputs") return TraceKind::Outputs;
  throw py::value_error("trace: expected 'times', 'outputs' or '', found '" + kind + "'");
}

py::tuple take_trace(Model& model) {
  Trace trace = model.take_trace();
  py::list outputs;
  for (OpOutput& o : trace.outputs) {
    py::tuple sizes(o.shape.ndim);
    for (int d = 0; d < o.shape.ndim; ++d) sizes[d] = o.shape.sizes[d];
    outputs.append(py::make_tuple(o.method, o.chain, o.instruction, o.event,
                                  dtype_name(o.shape.dtype), sizes,
                                  py::bytes(o.data.data(), o.data.size())));
    o.data = {};
  }
  return py::make_tuple(py::bytes(trace.etdump), outputs);
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<Session> make_session(std::shared_ptr<Model> model, std::optional<uint64_t> seed,
                                      bool draft) {
  auto session = std::make_shared<Session>(std::move(model), seed, draft);
  session->set_interrupt_check(check_signals);
  return session;
}

std::vector<Token> to_tokens(const std::vector<int64_t>& slots, const std::vector<int64_t>& ids) {
  if (slots.size() != ids.size())
    throw py::value_error("slots: expected one entry an id, " + std::to_string(ids.size()) +
                          ", found " + std::to_string(slots.size()));
  std::vector<Token> tokens;
  for (size_t i = 0; i < ids.size(); ++i) tokens.push_back({slots[i], ids[i]});
  return tokens;
}

template <class F>
auto without_gil(F&& f) {
  py::gil_scoped_release release;
  return f();
}

py::array pool_view(const py::object& self, int64_t layer, const std::string& part, bool draft) {
  Session& s = self.cast<Session&>();
  const Network network = draft ? Network::Draft : Network::Target;
  const int64_t layers = s.limits().caches(network).n_layers();
  if (layer < 0 || layer >= layers)
    throw py::value_error("layer: expected a value in [0, " + std::to_string(layers) + "), found " +
                          std::to_string(layer));
  if (part != "k" && part != "v")
    throw py::value_error("part: expected 'k' or 'v', found '" + part + "'");
  const Tensor t = s.model().pool(network, layer, part[0]);
  return py::array(numpy_dtype(t.dtype), std::vector<py::ssize_t>(t.sizes, t.sizes + t.ndim),
                   t.data, self);
}

py::object speculation_dict(const std::optional<SpeculationStats>& stats) {
  if (!stats) return py::none();
  using namespace py::literals;
  return py::dict(
      "passes"_a = stats->passes, "drafted"_a = stats->drafted, "accepted"_a = stats->accepted,
      "passes_by_block"_a = stats->passes_by_block,
      "passes_by_accepted"_a = stats->passes_by_accepted,
      "seconds_by_block"_a = stats->seconds_by_block, "draft_seconds"_a = stats->seconds.draft,
      "verify_seconds"_a = stats->seconds.verify, "inject_seconds"_a = stats->seconds.inject);
}

// speculation: the block length, 0 to choose it, or None.
py::dict generate(Session& s, int64_t slot, const std::vector<int64_t>& ids, int64_t max_new_tokens,
                  const SamplingParams& sampling, const std::vector<int64_t>& stop_ids,
                  int64_t chunk, const py::object& callback,
                  const std::optional<int64_t>& speculation) {
  Session::Callback go_on;
  if (!callback.is_none())
    go_on = [&callback](int64_t id) {
      py::gil_scoped_acquire gil;
      return !callback(id).is(py::bool_(false));
    };
  std::optional<Speculation> how;
  if (speculation) how = Speculation{*speculation};
  const GenerateResult r = without_gil(
      [&] { return s.generate(slot, ids, max_new_tokens, sampling, stop_ids, chunk, go_on, how); });
  using namespace py::literals;
  return py::dict("ids"_a = r.ids, "stop_reason"_a = stop_reason_name(r.stop_reason),
                  "prefill_tokens"_a = r.prefill_tokens, "prefill_seconds"_a = r.prefill_seconds,
                  "decode_tokens"_a = r.decode_tokens, "decode_seconds"_a = r.decode_seconds,
                  "speculation"_a = speculation_dict(r.speculation));
}

std::vector<std::vector<int64_t>> speculate(Session& s, const std::vector<int64_t>& slots,
                                            const std::vector<int64_t>& ids,
                                            const std::vector<int64_t>& blocks,
                                            const std::vector<SamplingParams>& sampling) {
  if (ids.size() != slots.size() || blocks.size() != slots.size() ||
      sampling.size() != slots.size())
    throw py::value_error("slots: expected as many as ids, blocks and sampling, found " +
                          std::to_string(slots.size()));
  std::vector<Anchor> anchors;
  for (size_t i = 0; i < slots.size(); ++i)
    anchors.push_back({slots[i], ids[i], blocks[i], sampling[i]});
  return without_gil([&] { return s.speculate(anchors); });
}

void bind_block_policy(py::module_& m) {
  py::class_<BlockPolicy>(m, "BlockPolicy", "Chooses block lengths: see runtime/block_policy.h.")
      .def(py::init<int64_t>(), py::arg("max_block"))
      .def("restart", &BlockPolicy::restart)
      .def("choose", &BlockPolicy::choose, py::arg("limit"))
      .def("observe", &BlockPolicy::observe, py::arg("block"), py::arg("accepted"),
           py::arg("seconds"))
      .def("tokens", &BlockPolicy::tokens, py::arg("block"))
      .def("cost", &BlockPolicy::cost, py::arg("block"))
      .def("measured", &BlockPolicy::measured);
}

void bind_page_pool(py::module_& m) {
  m.attr("PAGE_SIZE") = kPageSize;
  m.attr("ROLLBACK") = kRollback;
  m.attr("MAX_DECODE_ROWS") = kMaxDecodeRows;
  m.def("sliding_pages", &PagePool::sliding_pages, py::arg("window"), py::arg("max_chunk"),
        py::arg("slots"), py::arg("page_size") = kPageSize);
  py::class_<PagePool>(
      m, "PagePool",
      "Page tables of one kind of layer: see runtime/page_pool.h. ValueError for a "
      "bad argument, RuntimeError when pages run out; the pool is then unchanged.")
      .def(py::init([](int64_t pages, int64_t slots, int64_t max_pages, int64_t page_size,
                       int64_t window, std::optional<uint64_t> seed) {
             return PagePool({"pool", pages, slots, max_pages, page_size, window, seed});
           }),
           py::arg("pages"), py::arg("slots"), py::arg("max_pages"), py::kw_only(),
           py::arg("page_size") = kPageSize, py::arg("window") = 0, py::arg("seed") = py::none())
      .def(
          "reserve",
          [](PagePool& p, int64_t slot, int64_t first_pos, int64_t n) {
            std::vector<std::pair<int64_t, int64_t>> copies;
            for (const PageCopy& c : p.reserve(slot, first_pos, n))
              copies.emplace_back(c.src, c.dst);
            return copies;
          },
          py::arg("slot"), py::arg("first_pos"), py::arg("n"))
      .def("commit", &PagePool::commit, py::arg("slot"), py::arg("n"))
      .def("truncate", &PagePool::truncate, py::arg("slot"), py::arg("pos"))
      .def("share", &PagePool::share, py::arg("src"), py::arg("dst"), py::arg("n_tokens"))
      .def("release", &PagePool::release, py::arg("slot"))
      .def("table", [](const PagePool& p) { return table_array(p.table(), p.config().slots); })
      .def("length", &PagePool::length, py::arg("slot"))
      .def("refcount", &PagePool::refcount, py::arg("page"))
      .def("room", &PagePool::room, py::arg("slot"))
      .def("can_truncate", &PagePool::can_truncate, py::arg("slot"), py::arg("pos"))
      .def("free_pages", &PagePool::free_pages)
      .def("used_pages", &PagePool::used_pages);
}

void bind_model(py::module_& m) {
  py::class_<CacheLimits>(m, "CacheLimits")
      .def_readonly("global_pages", &CacheLimits::global_pages)
      .def_readonly("sliding_pages", &CacheLimits::sliding_pages)
      .def_readonly("window", &CacheLimits::window)
      .def_readonly("sliding_layers", &CacheLimits::sliding_layers)
      .def_property_readonly("n_layers", &CacheLimits::n_layers);
  py::class_<DraftLimits, CacheLimits>(m, "DraftLimits")
      .def(py::init([](int64_t block_size, int64_t mask_token_id, int64_t global_pages,
                       int64_t sliding_pages, int64_t window, std::vector<int64_t> layers) {
             return DraftLimits{{global_pages, sliding_pages, window, std::move(layers)},
                                block_size,
                                mask_token_id};
           }),
           py::kw_only(), py::arg("block_size"), py::arg("mask_token_id"), py::arg("global_pages"),
           py::arg("sliding_pages"), py::arg("window"), py::arg("sliding_layers"))
      .def_readonly("block_size", &DraftLimits::block_size)
      .def_readonly("mask_token_id", &DraftLimits::mask_token_id);
  py::class_<ModelLimits, CacheLimits>(m, "ModelLimits")
      .def(py::init([](int64_t vocab_size, int64_t max_seq_len, int64_t max_chunk, int64_t max_rows,
                       int64_t slots, int64_t page_size, int64_t global_pages,
                       int64_t sliding_pages, int64_t window, std::vector<int64_t> layers,
                       const std::optional<DraftLimits>& draft) {
             ModelLimits l{{global_pages, sliding_pages, window, std::move(layers)},
                           vocab_size,
                           max_seq_len,
                           max_chunk,
                           max_rows,
                           slots,
                           page_size,
                           draft.value_or(DraftLimits{})};
             check_limits(l);
             return l;
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("max_seq_len"), py::arg("max_chunk"),
           py::arg("max_rows"), py::arg("slots"), py::arg("page_size") = kPageSize,
           py::arg("global_pages"), py::arg("sliding_pages"), py::arg("window"),
           py::arg("sliding_layers"), py::arg("draft") = py::none())
      .def_readonly("vocab_size", &ModelLimits::vocab_size)
      .def_readonly("max_seq_len", &ModelLimits::max_seq_len)
      .def_readonly("max_chunk", &ModelLimits::max_chunk)
      .def_readonly("max_rows", &ModelLimits::max_rows)
      .def_readonly("slots", &ModelLimits::slots)
      .def_readonly("page_size", &ModelLimits::page_size)
      .def_property_readonly("draft",
                             [](const ModelLimits& l) {
                               return l.has_draft() ? std::optional(l.draft) : std::nullopt;
                             })
      .def_property_readonly("max_pages", &ModelLimits::max_pages);
  py::class_<SamplingParams>(m, "SamplingParams")
      .def(py::init<double, int64_t, double, int64_t>(), py::kw_only(), py::arg("temperature"),
           py::arg("top_k"), py::arg("top_p"), py::arg("seed"))
      .def_readonly("temperature", &SamplingParams::temperature)
      .def_readonly("top_k", &SamplingParams::top_k)
      .def_readonly("top_p", &SamplingParams::top_p)
      .def_readonly("seed", &SamplingParams::seed);
  py::class_<Model, PyModel, std::shared_ptr<Model>>(m, "Model")
      .def(py::init<ModelLimits>(), py::arg("limits"))
      .def_property_readonly("limits", &Model::limits)
      .def("take_trace", &take_trace,
           "(ETDump, outputs) since the last take: bytes, and for each output a tuple (method, "
           "chain, instruction, event, dtype, shape, bytes).");
  m.def(
      "load_program",
      [](const std::string& pte, const std::string& ptd, const std::string& trace) {
        const TraceKind kind = to_trace_kind(trace);
        return std::shared_ptr<Model>(without_gil([&] { return load_program(pte, ptd, kind); }));
      },
      py::arg("pte"), py::arg("ptd") = "", py::arg("trace") = "");
  m.def("tick_nanoseconds", &tick_nanoseconds, "Nanoseconds of a tick, the unit of an ETDump.");
  m.def(
      "data_file_tensors",
      [](const std::string& path) {
        std::vector<std::pair<std::string, uint64_t>> tensors;
        for (const FlatTensorEntry& e : read_flat_tensor_entries(path))
          tensors.emplace_back(e.key, e.bytes);
        return tensors;
      },
      py::arg("path"), "(key, bytes) of every tensor of a .ptd file.");
}

void bind_session_class(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init(&make_session), py::arg("model"), py::arg("page_seed") = py::none(),
           py::arg("draft") = false, py::keep_alive<1, 2>())
      .def_property_readonly("limits", &Session::limits)
      .def("open", &Session::open, release)
      .def("close", &Session::close, py::arg("slot"), release)
      .def(
          "prefill",
          [](Session& s, int64_t slot, const std::vector<int64_t>& ids, int64_t chunk,
             const Session::Rows& rows) {
            return logits_array(without_gil([&] { return s.prefill(slot, ids, chunk, rows); }));
          },
          py::arg("slot"), py::arg("ids"), py::arg("chunk"), py::arg("rows") = py::none())
      .def(
          "forward",
          [](Session& s, const std::vector<int64_t>& slots, const std::vector<int64_t>& ids,
             const std::vector<int64_t>& rows, const Session::Positions& positions) {
            const auto tokens = to_tokens(slots, ids);
            return logits_array(without_gil([&] { return s.forward(tokens, rows, positions); }));
          },
          py::arg("slots"), py::arg("ids"), py::arg("rows"), py::arg("positions") = py::none())
      .def(
          "decode",
          [](Session& s, const std::vector<int64_t>& slots, const std::vector<int64_t>& ids,
             const std::vector<SamplingParams>& sampling) {
            const auto tokens = to_tokens(slots, ids);
            return without_gil([&] { return s.decode(tokens, sampling); });
          },
          py::arg("slots"), py::arg("ids"), py::arg("sampling"))
      .def("generate", &generate, py::arg("slot"), py::arg("ids"), py::arg("max_new_tokens"),
           py::arg("sampling"), py::arg("stop_ids"), py::arg("chunk"), py::arg("callback"),
           py::arg("speculation"))
      .def("speculate", &speculate, py::arg("slots"), py::arg("ids"), py::arg("blocks"),
           py::arg("sampling"))
      .def("room", &Session::room, py::arg("slot"), release)
      .def_property_readonly("drafts", &Session::drafts)
      .def("truncate", &Session::truncate, py::arg("slot"), py::arg("length"), release)
      .def("share", &Session::share, py::arg("src"), py::arg("dst"), py::arg("n"), release)
      .def("length", &Session::length, py::arg("slot"), release)
      .def(
          "table",
          [](const Session& s, const std::string& kind) {
            const auto [network, k] = to_kind(kind);
            return table_array(s.table(network, k), s.limits().slots);
          },
          py::arg("kind"))
      .def(
          "pages_in_use",
          [](const Session& s, const std::string& kind) {
            const auto [network, k] = to_kind(kind);
            return s.pages_in_use(network, k);
          },
          py::arg("kind"))
      .def("pool", &pool_view, py::arg("layer"), py::arg("part"), py::arg("draft") = false);
}

}  // namespace

void bind_session(py::module_& m) {
  bind_page_pool(m);
  bind_model(m);
  bind_block_policy(m);
  bind_session_class(m);
  m.def("threads", &thread_count);
  m.def("set_threads", &set_thread_count, py::arg("n"));
}

}  // namespace glimmer
