// sdpa: grouped-query attention over a paged cache, causal or block-bidirectional, with an optional
// sliding window and a sigmoid gate.
//
// Every row goes through one fixed sequence of float32 operations that depends on its position
// alone: keys in tiles of kTile and splits of kSplit at absolute positions, an online softmax
// inside a split, splits combined in ascending order. Rows are SIMD lanes of the score product, so
// what else is in a tile of rows, and how work is cut into tasks, never changes a row's bits.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "glimmer/scratch.h"
#include "glimmer/simd.h"
#include "paged_cache.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

constexpr int64_t kTile = 64;          // keys widened to float32 at once
constexpr int64_t kSplit = 512;        // keys of one softmax pass
constexpr int64_t kRowsPerBlock = 64;  // query rows (tokens × heads of a group) that share a tile
constexpr int64_t kTasksPerWave = 64;  // bounds the memory for splits that wait to be combined

Status infer(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& pos,
             const Tensor& slot, OptTensor block_table, double scale, int64_t window, bool,
             OptTensor gate, Shape& out) {
  GLIMMER_RETURN_IF_ERROR(expect_float(q));
  GLIMMER_RETURN_IF_ERROR(expect_dims(q, 2));
  GLIMMER_RETURN_IF_ERROR(check_cache_args(k_cache, v_cache, block_table, pos, slot, q.size(0)));
  const int64_t kv_heads = k_cache.size(1), head_dim = k_cache.size(3);
  GLIMMER_RETURN_IF_ERROR(expect(
      q.size(1) > 0 && q.size(1) % (kv_heads * head_dim) == 0, q,
      "a multiple of " + std::to_string(kv_heads) + " heads of " + std::to_string(head_dim)));
  if (!std::isfinite(scale))
    return Status::error("scale: expected a finite value, found " + std::to_string(scale));
  if (window < 0)
    return Status::error("window: expected 0 (global) or more, found " + std::to_string(window));
  if (gate) GLIMMER_RETURN_IF_ERROR(expect_shape(*gate, shape_like(q)));
  out = shape_like(q);
  return {};
}

// --- Which keys each token sees

struct Token {
  int64_t row;         // in q
  int64_t begin, end;  // visible positions
};

// Tokens at consecutive positions of one slot: the union of what they see has no gaps.
struct Block {
  int64_t slot;
  std::vector<Token> tokens;
  int64_t begin, end;  // union of the tokens' ranges
};

struct Request {
  const int64_t *pos, *slot;
  int64_t tokens, window;
  bool causal;

  int64_t begin(int64_t t) const {
    return window > 0 && pos[t] >= window ? pos[t] - window + 1 : 0;
  }
};

// A row of a contiguous cache holds the last position written to it. Refuses a key that a later
// position of this call has overwritten, and any position past the end of a flat (global) cache.
Status check_contiguous(const PagedCache& cache, const Request& r, int64_t token, int64_t last) {
  if (cache.table) return {};
  if (r.window == 0 && r.pos[token] >= cache.page_size)
    return Status::error(token_name("pos", token) + "expected pos < cache_len " +
                         std::to_string(cache.page_size) + " in a cache without a window, found " +
                         std::to_string(r.pos[token]));
  if (last - r.begin(token) < cache.page_size) return {};
  return Status::error("k_cache: token " + std::to_string(token) + " sees position " +
                       std::to_string(r.begin(token)) + ", which position " + std::to_string(last) +
                       " of this call overwrote: expected cache_len >= " +
                       std::to_string(last - r.begin(token) + 1) + " for window " +
                       std::to_string(r.window) + ", found " + std::to_string(cache.page_size));
}

void append(std::vector<Block>& blocks, const Request& r, const Token& token, int64_t max_tokens) {
  const int64_t pos = r.pos[token.row], slot = r.slot[token.row];
  if (!blocks.empty()) {
    Block& b = blocks.back();
    if (b.slot == slot && pos - r.pos[b.tokens.back().row] <= 1 &&
        static_cast<int64_t>(b.tokens.size()) < max_tokens) {
      b.tokens.push_back(token);
      b.end = std::max(b.end, token.end);
      return;
    }
  }
  blocks.push_back({slot, {token}, token.begin, token.end});
}

// Sorts the tokens by slot and position, checks them, and groups them into blocks.
Status plan(const PagedCache& cache, const Request& r, int64_t max_tokens,
            std::vector<Block>& blocks) {
  std::vector<int64_t> order;
  for (int64_t t = 0; t < r.tokens; ++t) {
    GLIMMER_RETURN_IF_ERROR(check_position(cache, t, r.slot[t], r.pos[t]));
    if (r.slot[t] >= 0) order.push_back(t);
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::tie(r.slot[a], r.pos[a], a) < std::tie(r.slot[b], r.pos[b], b);
  });
  for (size_t i = 0, next; i < order.size(); i = next) {
    for (next = i; next < order.size() && r.slot[order[next]] == r.slot[order[i]];) ++next;
    const int64_t last = r.pos[order[next - 1]];
    for (size_t j = i; j < next; ++j) {
      const int64_t t = order[j];
      GLIMMER_RETURN_IF_ERROR(check_contiguous(cache, r, t, last));
      append(blocks, r, {t, r.begin(t), (r.causal ? r.pos[t] : last) + 1}, max_tokens);
    }
  }
  for (const Block& b : blocks)
    GLIMMER_RETURN_IF_ERROR(check_pages(cache, b.tokens[0].row, b.slot, b.begin, b.end));
  return {};
}

// --- The arithmetic of one split

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Zeroed floats on a cache line boundary: an unaligned 64-byte load costs two.
class Floats {
 public:
  explicit Floats(int64_t n) : lines_((n + 15) / 16), n_(n) {
    if (poison_scratch()) fill(NAN);
  }
  float* data() { return lines_.empty() ? nullptr : lines_[0].x; }
  const float* data() const { return lines_.empty() ? nullptr : lines_[0].x; }
  float& operator[](int64_t i) { return data()[i]; }
  float operator[](int64_t i) const { return data()[i]; }
  void fill(float value) { std::fill_n(data(), n_, value); }

 private:
  struct alignas(64) Line {
    float x[16] = {};
  };
  std::vector<Line> lines_;
  int64_t n_;
};

// The softmax state of `rows` query rows: the largest score, Σ exp(score - max) and the weighted
// sum of values, rows of `width` floats.
struct State {
  State(int64_t rows, int64_t width)
      : rows(rows), width(width), max(rows), sum(rows), acc(rows * width) {}

  void clear() {
    max.fill(-FLT_MAX);  // not -inf: (-inf) - (-inf) is NaN
    sum.fill(0.0f);
    acc.fill(0.0f);
  }

  int64_t rows, width;
  Floats max, sum, acc;
};

inline float exp1(float x) {
  float in[kLanes] = {x}, out[kLanes];
  store(out, exp(load(in)));
  return out[0];
}

// Adds the next split to what the splits before it gave.
void combine(State& total, const State& split) {
  for (int64_t r = 0; r < total.rows; ++r) {
    if (split.sum[r] == 0) continue;  // the row sees no key here: leave even the sign of its zeros
    const float max = std::max(total.max[r], split.max[r]);
    const float a = exp1(total.max[r] - max), b = exp1(split.max[r] - max);
    total.max[r] = max;
    total.sum[r] = total.sum[r] * a + split.sum[r] * b;
    float* x = total.acc.data() + r * total.width;
    const float* y = split.acc.data() + r * total.width;
    for (int64_t i = 0; i < total.width; i += kLanes)
      store(x + i, load(x + i) * set1(a) + load(y + i) * set1(b));
  }
}

// One thread's working memory, and the shape of the problem.
struct Scratch {
  Scratch(int64_t max_rows, int64_t dim)
      : dim(dim),
        width(round_up(dim, kLanes)),
        lanes(round_up(max_rows, kLanes)),
        q(dim * lanes),
        k(kTile * dim),
        v(kTile * width),
        scores(kTile * lanes),
        alpha(lanes),
        split(lanes, width) {}

  int64_t dim, width;  // head_dim, and rounded up to whole vectors
  int64_t lanes;       // rows, rounded up to whole vectors
  Floats q;            // [dim][lanes]
  Floats k;            // [kTile][dim]
  Floats v;            // [kTile][width], zero beyond dim
  Floats scores;       // [kTile][lanes]
  Floats alpha;        // [lanes]
  State split;
};

// scores[j][r] = Σ_d k[j][d] · q[d][r] for KEYS keys and VECS vectors of rows, d ascending.
template <int KEYS, int VECS>
inline void score_block(const Scratch& s, const float* k, const float* q, float* scores) {
  Vec acc[KEYS][VECS];
  for (auto& row : acc)
    for (Vec& a : row) a = zero();
  for (int64_t d = 0; d < s.dim; ++d) {
    Vec x[VECS];
    for (int i = 0; i < VECS; ++i) x[i] = load(q + d * s.lanes + i * kLanes);
    for (int j = 0; j < KEYS; ++j) {
      const Vec y = set1(k[j * s.dim + d]);
      for (int i = 0; i < VECS; ++i) acc[j][i] = fma(y, x[i], acc[j][i]);
    }
  }
  for (int j = 0; j < KEYS; ++j)
    for (int i = 0; i < VECS; ++i) store(scores + j * s.lanes + i * kLanes, acc[j][i]);
}

constexpr int kScoreKeys = kLanes == 16 ? 8 : 4;
constexpr int kScoreVecs = 2;
static_assert(kTile % kScoreKeys == 0);

// Scores of keys [begin, end) of the tile; rounded out to whole blocks of keys.
void score_tile(Scratch& s, int64_t begin, int64_t end) {
  for (int64_t j = begin / kScoreKeys * kScoreKeys; j < end; j += kScoreKeys) {
    const float* k = s.k.data() + j * s.dim;
    float* scores = s.scores.data() + j * s.lanes;
    int64_t r = 0;
    for (; r + kScoreVecs * kLanes <= s.lanes; r += kScoreVecs * kLanes)
      score_block<kScoreKeys, kScoreVecs>(s, k, s.q.data() + r, scores + r);
    for (; r < s.lanes; r += kLanes) score_block<kScoreKeys, 1>(s, k, s.q.data() + r, scores + r);
  }
}

// Row r's values, acc[r][:] = acc[r][:] · alpha + Σ_j p[j][r] · v[j][:], j ascending, for ROWS rows
// that see the same keys [begin, end) and VECS vectors of the head.
template <int ROWS, int VECS>
inline void value_block(const Scratch& s, int64_t row, int64_t column, int64_t begin, int64_t end,
                        float* out) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < VECS; ++i)
      acc[r][i] = load(out + r * s.width + i * kLanes) * set1(s.alpha[row + r]);
  for (int64_t j = begin; j < end; ++j) {
    Vec v[VECS];
    for (int i = 0; i < VECS; ++i) v[i] = load(s.v.data() + j * s.width + column + i * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const Vec p = set1(s.scores[j * s.lanes + row + r]);
      for (int i = 0; i < VECS; ++i) acc[r][i] = fma(p, v[i], acc[r][i]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < VECS; ++i) store(out + r * s.width + i * kLanes, acc[r][i]);
}

constexpr int kValueRows = 4;
constexpr int kValueVecs = kLanes == 16 ? 4 : 2;

template <int ROWS>
void value_rows(Scratch& s, int64_t row, int64_t begin, int64_t end) {
  float* acc = s.split.acc.data() + row * s.width;
  int64_t c = 0;
  for (; c + kValueVecs * kLanes <= s.width; c += kValueVecs * kLanes)
    value_block<ROWS, kValueVecs>(s, row, c, begin, end, acc + c);
  for (; c < s.width; c += kLanes) value_block<ROWS, 1>(s, row, c, begin, end, acc + c);
}

// --- One block of tokens, one kv head

template <class T, class C>
class Attention {
 public:
  Attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, OptTensor gate,
            const PagedCache& cache, double scale, Tensor& out)
      : q_(q.ptr<T>()),
        gate_(gate ? gate->ptr<T>() : nullptr),
        out_(out.ptr<T>()),
        k_(k_cache.ptr<C>()),
        v_(v_cache.ptr<C>()),
        cache_(cache),
        scale_(static_cast<float>(scale)),
        width_(q.size(1)),
        group_(q.size(1) / cache.head_dim / cache.kv_heads) {}

  // s.q = scale · q, one lane a row: lane t·group + h is head h of the block's t-th token.
  void load_queries(Scratch& s, const Block& b, int64_t kv_head) const {
    s.q.fill(0.0f);
    int64_t lane = 0;
    for (const Token& t : b.tokens)
      for (int64_t h = 0; h < group_; ++h, ++lane) {
        const T* row = q_ + t.row * width_ + (kv_head * group_ + h) * s.dim;
        for (int64_t d = 0; d < s.dim; ++d) s.q[d * s.lanes + lane] = to_float(row[d]) * scale_;
      }
  }

  // Attention of the block over split number `index`, from nothing, into s.split.
  void run_split(Scratch& s, const Block& b, int64_t kv_head, int64_t index) const {
    s.split.clear();
    const int64_t begin = std::max(b.begin, index * kSplit);
    const int64_t end = std::min(b.end, (index + 1) * kSplit);
    for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
      const int64_t lo = std::max(begin, tile) - tile, hi = std::min(end, tile + kTile) - tile;
      load_tile(s, b.slot, kv_head, tile, lo, hi);
      score_tile(s, lo, hi);
      mask(s, b, tile, lo, hi, -INFINITY);
      softmax_tile(s, lo, hi);
      mask(s, b, tile, lo, hi, 0.0f);
      sum_tile(s, lo, hi);
      value_tile(s, b, tile);
    }
  }

  // out = acc / sum, times sigmoid(gate), rounded once to T.
  void finish(const State& total, const Block& b, int64_t kv_head) const {
    int64_t row = 0;
    for (const Token& t : b.tokens)
      for (int64_t h = 0; h < group_; ++h, ++row)
        write_row(total, row, t.row * width_ + (kv_head * group_ + h) * cache_.head_dim);
  }

 private:
  template <class From>
  static void widen(const From* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
  }

  // Keys and values [lo, hi) of a tile. Keys outside stay as they are: finite or not, their scores
  // are masked and their values unread.
  void load_tile(Scratch& s, int64_t slot, int64_t kv_head, int64_t tile, int64_t lo,
                 int64_t hi) const {
    for (int64_t j = lo; j < hi; ++j) {
      const int64_t at = cache_.offset(slot, tile + j, kv_head);
      widen(k_ + at, s.k.data() + j * s.dim, s.dim);
      widen(v_ + at, s.v.data() + j * s.width, s.dim);
    }
  }

  // Overwrites the entries of keys that a row does not see.
  void mask(Scratch& s, const Block& b, int64_t tile, int64_t lo, int64_t hi, float value) const {
    int64_t row = 0;
    for (const Token& t : b.tokens) {
      const int64_t begin = std::clamp(t.begin - tile, lo, hi);
      const int64_t end = std::clamp(t.end - tile, lo, hi);
      float* scores = s.scores.data() + row;
      for (int64_t j = lo; j < begin; ++j) std::fill_n(scores + j * s.lanes, group_, value);
      for (int64_t j = end; j < hi; ++j) std::fill_n(scores + j * s.lanes, group_, value);
      row += group_;
    }
  }

  // Scores become exp(score - max); alpha is what the new max makes of the sums so far.
  void softmax_tile(Scratch& s, int64_t lo, int64_t hi) const {
    for (int64_t r = 0; r < s.lanes; r += kLanes) {
      float* column = s.scores.data() + r;
      const Vec before = load(s.split.max.data() + r);
      Vec m = before;
      for (int64_t j = lo; j < hi; ++j) m = max(m, load(column + j * s.lanes));
      for (int64_t j = lo; j < hi; ++j)
        store(column + j * s.lanes, exp(load(column + j * s.lanes) - m));
      store(s.split.max.data() + r, m);
      store(s.alpha.data() + r, exp(before - m));
    }
  }

  void sum_tile(Scratch& s, int64_t lo, int64_t hi) const {
    for (int64_t r = 0; r < s.lanes; r += kLanes) {
      Vec sum = zero();
      for (int64_t j = lo; j < hi; ++j) sum = sum + load(s.scores.data() + j * s.lanes + r);
      float* total = s.split.sum.data() + r;
      store(total, load(total) * load(s.alpha.data() + r) + sum);
    }
  }

  void value_tile(Scratch& s, const Block& b, int64_t tile) const {
    int64_t row = 0;
    for (const Token& t : b.tokens) {
      const int64_t begin = std::clamp<int64_t>(t.begin - tile, 0, kTile);
      const int64_t end = std::clamp<int64_t>(t.end - tile, 0, kTile);
      int64_t h = 0;
      for (; h + kValueRows <= group_; h += kValueRows)
        value_rows<kValueRows>(s, row + h, begin, end);
      for (; h < group_; ++h) value_rows<1>(s, row + h, begin, end);
      row += group_;
    }
  }

  void write_row(const State& total, int64_t row, int64_t at) const {
    const int64_t dim = cache_.head_dim;
    const float* acc = total.acc.data() + row * total.width;
    const Vec inverse = set1(1.0f / total.sum[row]);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, dim - i));
      Vec y = load(acc + i) * inverse;
      if (gate_) y = y * sigmoid(n == kLanes ? load(gate_ + at + i) : load_tail(gate_ + at + i, n));
      if (n == kLanes)
        store(out_ + at + i, y);
      else
        store_tail(out_ + at + i, y, n);
    }
  }

  const T *q_, *gate_;
  T* out_;
  const C *k_, *v_;
  const PagedCache& cache_;
  float scale_;
  int64_t width_, group_;
};

// --- Scheduling

// The splits that a block's keys touch.
int64_t first_split(const Block& b) {
  return b.begin / kSplit;
}
int64_t end_split(const Block& b) {
  return (b.end + kSplit - 1) / kSplit;
}

// Threads get contiguous shares of tasks: alternates the first blocks of a prompt, which see
// little, with the last ones.
int64_t balanced(int64_t i, int64_t n) {
  return i % 2 ? n - 1 - i / 2 : i / 2;
}

// Enough blocks for every thread: a task takes one block and kv head through all its splits.
template <class A>
void run_blocks(const Context& ctx, const A& attention, const std::vector<Block>& blocks,
                int64_t kv_heads, int64_t max_rows, int64_t dim) {
  const int64_t n = static_cast<int64_t>(blocks.size());
  ctx.parallel(n * kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch s(max_rows, dim);
    State total(s.lanes, s.width);
    for (int64_t task = begin; task < end; ++task) {
      const Block& b = blocks[balanced(task / kv_heads, n)];
      attention.load_queries(s, b, task % kv_heads);
      total.clear();
      for (int64_t i = first_split(b); i < end_split(b); ++i) {
        attention.run_split(s, b, task % kv_heads, i);
        combine(total, s.split);
      }
      attention.finish(total, b, task % kv_heads);
    }
  });
}

// Few blocks: all their splits run in parallel, a wave at a time, and are combined per block in
// ascending order, exactly as run_blocks does.
template <class A>
void run_splits(const Context& ctx, const A& attention, const std::vector<Block>& blocks,
                int64_t kv_heads, int64_t max_rows, int64_t dim) {
  struct Unit {
    int64_t block, split;
  };
  std::vector<Unit> units;
  for (size_t i = 0; i < blocks.size(); ++i)
    for (int64_t s = first_split(blocks[i]); s < end_split(blocks[i]); ++s)
      units.push_back({static_cast<int64_t>(i), s});

  State empty(round_up(max_rows, kLanes), round_up(dim, kLanes));
  empty.clear();
  std::vector<State> totals(blocks.size() * kv_heads, empty);
  const int64_t n_units = static_cast<int64_t>(units.size());
  const int64_t per_wave = std::min(n_units, std::max<int64_t>(1, kTasksPerWave / kv_heads));
  std::vector<State> partials(per_wave * kv_heads, empty);
  for (int64_t wave = 0; wave < n_units; wave += per_wave) {
    const int64_t tasks = std::min(per_wave, n_units - wave) * kv_heads;
    ctx.parallel(tasks, 1, [&](int64_t begin, int64_t end) {
      Scratch s(max_rows, dim);
      for (int64_t task = begin; task < end; ++task) {
        const Unit& u = units[wave + task / kv_heads];
        attention.load_queries(s, blocks[u.block], task % kv_heads);
        attention.run_split(s, blocks[u.block], task % kv_heads, u.split);
        std::swap(partials[task], s.split);
      }
    });
    for (int64_t task = 0; task < tasks; ++task)
      combine(totals[units[wave + task / kv_heads].block * kv_heads + task % kv_heads],
              partials[task]);
  }
  for (size_t i = 0; i < totals.size(); ++i)
    attention.finish(totals[i], blocks[i / kv_heads], i % kv_heads);
}

template <class A>
void schedule(const Context& ctx, const A& attention, const std::vector<Block>& blocks,
              int64_t kv_heads, int64_t group, int64_t dim) {
  size_t most_tokens = 0;
  for (const Block& b : blocks) most_tokens = std::max(most_tokens, b.tokens.size());
  const int64_t max_rows = static_cast<int64_t>(most_tokens) * group;
  if (static_cast<int64_t>(blocks.size()) * kv_heads >= kTasksPerWave / 2)
    return run_blocks(ctx, attention, blocks, kv_heads, max_rows, dim);
  run_splits(ctx, attention, blocks, kv_heads, max_rows, dim);
}

Status run(const Context& ctx, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
           const Tensor& pos, const Tensor& slot, OptTensor block_table, double scale,
           int64_t window, bool causal, OptTensor gate, Tensor& out) {
  const PagedCache cache(k_cache, block_table);
  const Request request{pos.ptr<int64_t>(), slot.ptr<int64_t>(), q.size(0), window, causal};
  const int64_t group = q.size(1) / cache.head_dim / cache.kv_heads;
  std::vector<Block> blocks;
  GLIMMER_RETURN_IF_ERROR(
      plan(cache, request, std::max<int64_t>(1, kRowsPerBlock / group), blocks));
  const int64_t row_bytes = q.size(1) * element_size(q.dtype);
  for (int64_t t = 0; t < q.size(0); ++t)
    if (request.slot[t] < 0) std::memset(out.ptr<char>() + t * row_bytes, 0, row_bytes);
  with_float_type(q.dtype, [&](auto t) {
    with_float_type(k_cache.dtype, [&](auto c) {
      const Attention<decltype(t), decltype(c)> attention(q, k_cache, v_cache, gate, cache, scale,
                                                          out);
      schedule(ctx, attention, blocks, cache.kv_heads, group, cache.head_dim);
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(sdpa, infer, run, "q", "k_cache", "v_cache", "pos", "slot", "block_table", "scale",
               "window", "causal", "gate")
}  // namespace glimmer::GLIMMER_ISA_NS
