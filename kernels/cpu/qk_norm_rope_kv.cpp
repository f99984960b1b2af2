// qk_norm_rope_kv: RMS-normalises and rotates q and k per head, appends k and v to the cache.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "glimmer/scratch.h"
#include "norm.h"
#include "paged_cache.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

enum class Rope { None, Interleaved, Half, Unknown };

Rope parse_rope(std::string_view rope) {
  if (rope == "none") return Rope::None;
  if (rope == "interleaved") return Rope::Interleaved;
  return rope == "half" ? Rope::Half : Rope::Unknown;
}

Status check_rope(std::string_view rope, double theta, const Tensor& k_cache) {
  const Rope kind = parse_rope(rope);
  if (kind == Rope::Unknown)
    return Status::error("rope: expected 'none', 'interleaved' or 'half', found '" +
                         std::string(rope) + "'");
  if (kind == Rope::None) return {};
  if (!std::isfinite(theta) || theta <= 0)
    return Status::error("theta: expected a finite value > 0, found " + std::to_string(theta));
  return expect(k_cache.size(3) % 2 == 0, k_cache, "an even head_dim for a rotation");
}

Status infer(OptTensor q, const Tensor& k, const Tensor& v, OptTensor q_weight, OptTensor k_weight,
             double eps, std::string_view rope, double theta, const Tensor& pos, const Tensor& slot,
             OptTensor block_table, const Tensor& k_cache, const Tensor& v_cache, Shape& out) {
  GLIMMER_RETURN_IF_ERROR(expect_float(k));
  GLIMMER_RETURN_IF_ERROR(expect_dims(k, 2));
  const int64_t tokens = k.size(0);
  GLIMMER_RETURN_IF_ERROR(check_cache_args(k_cache, v_cache, block_table, pos, slot, tokens));
  const int64_t kv_heads = k_cache.size(1), head_dim = k_cache.size(3);
  GLIMMER_RETURN_IF_ERROR(
      expect(k.size(1) == kv_heads * head_dim, k,
             "[T, kv_heads * head_dim = " + std::to_string(kv_heads * head_dim) + "]"));
  GLIMMER_RETURN_IF_ERROR(expect_shape(v, shape_like(k)));
  if (q) {
    GLIMMER_RETURN_IF_ERROR(expect_dtype(*q, k.dtype));
    GLIMMER_RETURN_IF_ERROR(expect(q->ndim == 2 && q->size(0) == tokens, *q,
                                   "[" + std::to_string(tokens) + ", n_heads * head_dim]"));
    GLIMMER_RETURN_IF_ERROR(expect(
        q->size(1) > 0 && q->size(1) % (kv_heads * head_dim) == 0, *q,
        "a multiple of " + std::to_string(kv_heads) + " heads of " + std::to_string(head_dim)));
  }
  GLIMMER_RETURN_IF_ERROR(check_norm_weight(q_weight, head_dim));
  GLIMMER_RETURN_IF_ERROR(check_norm_weight(k_weight, head_dim));
  GLIMMER_RETURN_IF_ERROR(check_eps("eps", eps));
  GLIMMER_RETURN_IF_ERROR(check_rope(rope, theta, k_cache));
  out = q ? shape_like(*q) : shape_of(k.dtype, {0});
  return {};
}

Status duplicate(const PagedCache& cache, const int64_t* pos, const int64_t* slot, int64_t a,
                 int64_t b) {
  if (a > b) std::swap(a, b);
  auto name = [&](int64_t t) {
    return "token " + std::to_string(t) + " (slot " + std::to_string(slot[t]) + ", pos " +
           std::to_string(pos[t]) + ")";
  };
  return Status::error("pos: expected every token to write its own cache row, found " + name(a) +
                       " and " + name(b) + " both at row " +
                       std::to_string(cache.physical_row(slot[a], pos[a]) % cache.page_size) +
                       " of page " + std::to_string(cache.physical_page(slot[a], pos[a])));
}

// Two tokens at one row would race; it also means a table or a ring that lost a position.
Status check_distinct(const PagedCache& cache, const int64_t* pos, const int64_t* slot,
                      int64_t tokens) {
  std::vector<std::pair<int64_t, int64_t>> rows;
  rows.reserve(tokens);
  for (int64_t t = 0; t < tokens; ++t)
    if (slot[t] >= 0) rows.emplace_back(cache.physical_row(slot[t], pos[t]), t);
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i)
    if (rows[i].first == rows[i - 1].first)
      return duplicate(cache, pos, slot, rows[i - 1].second, rows[i].second);
  return {};
}

Status check_tokens(const PagedCache& cache, const int64_t* pos, const int64_t* slot,
                    int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t) {
    GLIMMER_RETURN_IF_ERROR(check_position(cache, t, slot[t], pos[t]));
    if (slot[t] >= 0) GLIMMER_RETURN_IF_ERROR(check_pages(cache, t, slot[t], pos[t], pos[t] + 1));
  }
  return check_distinct(cache, pos, slot, tokens);
}

// Rotation frequencies theta^(-2i/head_dim) in float64: a float32 angle is already off by a
// hundredth of a radian at position 131071.
class Rotation {
 public:
  Rotation(Rope kind, double theta, int64_t head_dim) : kind_(kind), half_(head_dim / 2) {
    if (kind == Rope::None) return;
    for (int64_t i = 0; i < half_; ++i)
      frequency_.push_back(
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  }

  // cos and sin of every pair's angle at a position, shared by all heads of a token.
  void angles(int64_t pos, float* cosine, float* sine) const {
    for (size_t i = 0; i < frequency_.size(); ++i) {
      const double angle = static_cast<double>(pos) * frequency_[i];
      cosine[i] = static_cast<float>(std::cos(angle));
      sine[i] = static_cast<float>(std::sin(angle));
    }
  }

  void rotate(float* x, const float* cosine, const float* sine) const {
    if (kind_ == Rope::None) return;
    const int64_t step = kind_ == Rope::Interleaved ? 2 : 1;
    const int64_t partner = kind_ == Rope::Interleaved ? 1 : half_;
    for (int64_t i = 0; i < half_; ++i) {
      float& a = x[i * step];
      float& b = x[i * step + partner];
      const float a0 = a, b0 = b;
      a = a0 * cosine[i] - b0 * sine[i];
      b = a0 * sine[i] + b0 * cosine[i];
    }
  }

 private:
  Rope kind_;
  int64_t half_;
  std::vector<double> frequency_;
};

template <class From, class To>
void convert_row(const From* x, To* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i));
  if (i < n) store_tail(y + i, load_tail(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

struct Args {
  OptTensor q;
  const Tensor &k, &v;
  NormWeight q_weight, k_weight;
  double eps;
  Rotation rotation;
  const int64_t *pos, *slot;
  PagedCache cache;
  const Tensor &k_cache, &v_cache;
  Tensor& out;
};

// Scratch for one thread: a head in float32 and the token's angles.
struct Scratch {
  explicit Scratch(int64_t head_dim) : head(head_dim), cosine(head_dim / 2), sine(head_dim / 2) {
    if (!poison_scratch()) return;
    for (auto* v : {&head, &cosine, &sine}) std::fill(v->begin(), v->end(), NAN);
  }
  std::vector<float> head, cosine, sine;
};

template <class T, class To>
void norm_rotate(const Args& a, const T* x, const NormWeight& weight, Scratch& s, To* y) {
  const int64_t dim = a.cache.head_dim;
  scale_row(x, weight, inverse_rms(x, dim, a.eps), s.head.data(), dim);
  a.rotation.rotate(s.head.data(), s.cosine.data(), s.sine.data());
  convert_row(s.head.data(), y, dim);
}

template <class T>
void write_queries(const Args& a, int64_t token, Scratch& s) {
  const int64_t dim = a.cache.head_dim, width = a.q->size(1);
  const T* q = a.q->ptr<T>() + token * width;
  T* out = a.out.ptr<T>() + token * width;
  if (a.slot[token] < 0) {
    std::fill_n(out, width, from_float<T>(0.0f));
    return;
  }
  for (int64_t i = 0; i < width; i += dim) norm_rotate(a, q + i, a.q_weight, s, out + i);
}

template <class T, class C>
void write_cache(const Args& a, int64_t token, Scratch& s) {
  const int64_t dim = a.cache.head_dim;
  for (int64_t h = 0; h < a.cache.kv_heads; ++h) {
    const int64_t from = (token * a.cache.kv_heads + h) * dim;
    const int64_t to = a.cache.offset(a.slot[token], a.pos[token], h);
    norm_rotate(a, a.k.ptr<T>() + from, a.k_weight, s, a.k_cache.ptr<C>() + to);
    convert_row(a.v.ptr<T>() + from, a.v_cache.ptr<C>() + to, dim);
  }
}

template <class T, class C>
void write_tokens(const Args& a, int64_t begin, int64_t end) {
  Scratch scratch(a.cache.head_dim);
  for (int64_t t = begin; t < end; ++t) {
    if (a.slot[t] >= 0) {
      a.rotation.angles(a.pos[t], scratch.cosine.data(), scratch.sine.data());
      write_cache<T, C>(a, t, scratch);
    }
    if (a.q) write_queries<T>(a, t, scratch);
  }
}

Status run(const Context& ctx, OptTensor q, const Tensor& k, const Tensor& v, OptTensor q_weight,
           OptTensor k_weight, double eps, std::string_view rope, double theta, const Tensor& pos,
           const Tensor& slot, OptTensor block_table, const Tensor& k_cache, const Tensor& v_cache,
           Tensor& out) {
  const PagedCache cache(k_cache, block_table);
  const int64_t tokens = k.size(0), dim = cache.head_dim;
  GLIMMER_RETURN_IF_ERROR(check_tokens(cache, pos.ptr<int64_t>(), slot.ptr<int64_t>(), tokens));
  const Args args{q,
                  k,
                  v,
                  NormWeight(q_weight, dim),
                  NormWeight(k_weight, dim),
                  eps,
                  Rotation(parse_rope(rope), theta, dim),
                  pos.ptr<int64_t>(),
                  slot.ptr<int64_t>(),
                  cache,
                  k_cache,
                  v_cache,
                  out};
  const int64_t width = (q ? q->size(1) : 0) + 2 * k.size(1);
  with_float_type(k.dtype, [&](auto t) {
    with_float_type(k_cache.dtype, [&](auto c) {
      ctx.parallel(tokens, rows_per_task(width), [&](int64_t begin, int64_t end) {
        write_tokens<decltype(t), decltype(c)>(args, begin, end);
      });
    });
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(qk_norm_rope_kv, infer, run, "q", "k", "v", "q_weight", "k_weight", "eps", "rope",
               "theta", "pos", "slot", "block_table", "k_cache", "v_cache")
}  // namespace glimmer::GLIMMER_ISA_NS
