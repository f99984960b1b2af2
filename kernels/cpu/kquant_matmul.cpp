// The matmul behind kquant_matmul.h. Few rows of x: weights are decoded in registers and used for
// all of them. More rows: a panel of decoded weight rows that fits the cache serves every row of x.
// Both run the same steps in the same order for an output element, so their bits are equal.
#include "kquant_matmul.h"

#include "kquant_decode.h"
#include "kquant_int8.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

constexpr int kTileRows = 4;                // rows of x in a register tile
constexpr int64_t kPanelBytes = 256 << 10;  // of decoded weights: about a quarter of an L2 cache
constexpr int64_t kMaxPanelRows = 16;
constexpr int64_t kPrefetchBytes = 1024;

// Float activations and weights: the exact path, and float weight types.
struct FloatPath {
  static constexpr int kSums = 4;  // independent chains
  static constexpr int kStep = kLanes > 1 ? kLanes : 8;

  struct Weight {
    alignas(64) float w[kSuperBlock];
  };
  struct Acts {
    float x[kSuperBlock];
  };
  struct Acc {
    float lane[kStep] = {};
  };

  DecodeFn decode_fn;
  QTypeInfo type;

  explicit FloatPath(QType q) : decode_fn(decoder(q)), type(info(q)) {}
  static int64_t units(int64_t k) { return (k + kSuperBlock - 1) / kSuperBlock; }
  int64_t unit_bytes() const { return kSuperBlock / type.block * type.bytes; }

  void decode(const uint8_t* row, int64_t k, int64_t unit, Weight& out) const {
    const int64_t count = std::min(kSuperBlock, k - unit * kSuperBlock);
    decode_fn(row + unit * unit_bytes(), count, out.w);
    std::fill(out.w + count, out.w + kSuperBlock, 0.0f);
  }

  // Each super-block is summed on its own first, which keeps rounding errors small in long rows.
  static void dot(const Weight& w, const Acts& a, Acc& acc) {
    if constexpr (kLanes > 1) {
      Vec sum[kSums] = {zero(), zero(), zero(), zero()};
      for (int i = 0; i < kSuperBlock; i += kSums * kLanes)
        for (int s = 0; s < kSums; ++s)
          sum[s] = fma(load(w.w + i + s * kLanes), load(a.x + i + s * kLanes), sum[s]);
      store(acc.lane, load(acc.lane) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    } else {
      float sum[kStep] = {};
      for (int i = 0; i < kSuperBlock; i += kStep)
        for (int l = 0; l < kStep; ++l) sum[l] += w.w[i + l] * a.x[i + l];
      for (int l = 0; l < kStep; ++l) acc.lane[l] += sum[l];
    }
  }

  static float finish(const Acc& acc) {
    float v[kStep];
    std::copy(acc.lane, acc.lane + kStep, v);
    for (int n = kStep / 2; n; n /= 2)
      for (int i = 0; i < n; ++i) v[i] += v[i + n];
    return v[0];
  }
};

template <QType Q>
struct Int8Path : IntPath<Q> {
  using Base = IntPath<Q>;
  using typename Base::Weight;

  static int64_t units(int64_t k) {
    constexpr int64_t size = kSuperBlock * Base::kBlocks;
    return (k + size - 1) / size;
  }
  static constexpr int64_t unit_bytes() {
    return Base::kBlocks * kSuperBlock / info(Q).block * info(Q).bytes;
  }
  GLIMMER_INLINE static void decode(const uint8_t* row, int64_t k, int64_t unit, Weight& out) {
    out = Base::decode(row, k, unit);
  }
};

// Weight rows as they are stored: decodes a unit into registers.
template <class Path>
struct RawRows {
  using Weight = typename Path::Weight;
  const Path& path;
  const QMatrix& matrix;

  GLIMMER_INLINE Weight unit(int64_t row, int64_t u) const {
    Weight w;
    decode(row, u, w);
    return w;
  }

  // Also fetches what comes next in the row or, since rows lie one after another, behind it.
  GLIMMER_INLINE void decode(int64_t row, int64_t u, Weight& w) const {
    const uint8_t* p = matrix.row(row);
    const int64_t bytes = path.unit_bytes();
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + u * bytes + kPrefetchBytes + i);
    path.decode(p, matrix.k, u, w);
  }
};

// Decoded weight rows.
template <class Path>
struct PanelRows {
  using Weight = typename Path::Weight;
  const Weight* panel;
  int64_t units;

  GLIMMER_INLINE const Weight& unit(int64_t row, int64_t u) const { return panel[row * units + u]; }
};

// Calls f with the constants 0 ... N - 1, so that what they index stays in registers.
template <int... I, class F>
GLIMMER_INLINE void unroll_each(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
GLIMMER_INLINE void unroll(F&& f) {
  unroll_each(std::make_integer_sequence<int, N>{}, f);
}

// R weight rows (row, row + row_step, ...) times MT rows of x, for y at the first weight row.
template <class Path, int R, int MT, class Rows>
__attribute__((noinline)) void tile(const Rows& rows, int64_t row, int64_t row_step,
                                    const typename Path::Acts* x, int64_t units, float* y,
                                    int64_t y_stride) {
  typename Path::Acc acc[R][MT];
  for (int64_t u = 0; u < units; ++u) {
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const auto& w = rows.unit(row + r * row_step, u);
      unroll<MT>([&](auto m)
                     __attribute__((always_inline)) { Path::dot(w, x[m * units + u], acc[r][m]); });
    });
  }
  unroll<R>([&](auto r) {
    unroll<MT>([&](auto m) { y[m * y_stride + r * row_step] = Path::finish(acc[r][m]); });
  });
}

// `count` weight rows from `row` times MT rows of x; R of them at a time, far apart so that each is
// a memory stream of its own.
template <class Path, int R, int MT, class Rows>
void tiles(const Rows& rows, int64_t row, int64_t count, const typename Path::Acts* x,
           int64_t units, float* y, int64_t y_stride) {
  const int64_t step = count / R;
  for (int64_t i = 0; i < step; ++i)
    tile<Path, R, MT>(rows, row + i, step, x, units, y + i, y_stride);
  for (int64_t i = step * R; i < count; ++i)
    tile<Path, 1, MT>(rows, row + i, 0, x, units, y + i, y_stride);
}

template <class Path, class Rows>
void tiles(int mt, const Rows& rows, int64_t row, int64_t count, const typename Path::Acts* x,
           int64_t units, float* y, int64_t y_stride) {
  switch (mt) {
    case 1:
      return tiles<Path, 4, 1>(rows, row, count, x, units, y, y_stride);
    case 2:
      return tiles<Path, 2, 2>(rows, row, count, x, units, y, y_stride);
    case 3:
      return tiles<Path, 2, 3>(rows, row, count, x, units, y, y_stride);
    default:
      return tiles<Path, 2, kTileRows>(rows, row, count, x, units, y, y_stride);
  }
}

template <class Path>
void matmul(const Path& path, const Activations& x, const QMatrix& w, int64_t begin, int64_t end,
            float* y, int64_t y_stride) {
  using Weight = typename Path::Weight;
  const auto* acts = static_cast<const typename Path::Acts*>(x.data);
  const int64_t units = x.units;
  const RawRows<Path> raw{path, w};
  if (x.rows <= kTileRows)
    return tiles<Path>(static_cast<int>(x.rows), raw, begin, end - begin, acts, units, y, y_stride);

  static thread_local Scratch scratch;
  const int64_t row_size = units * static_cast<int64_t>(sizeof(Weight));
  const int64_t panel_rows = std::clamp<int64_t>(kPanelBytes / row_size, 2, kMaxPanelRows);
  Weight* panel = scratch.get<Weight>(static_cast<size_t>(panel_rows * units));
  for (int64_t n = begin; n < end; n += panel_rows) {
    const int64_t count = std::min(panel_rows, end - n);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t u = 0; u < units; ++u) raw.decode(n + r, u, panel[r * units + u]);
    for (int64_t m = 0; m < x.rows; m += kTileRows)
      tiles<Path>(static_cast<int>(std::min<int64_t>(kTileRows, x.rows - m)),
                  PanelRows<Path>{panel, units}, 0, count, acts + m * units, units,
                  y + m * y_stride + (n - begin), y_stride);
  }
}

// x[offset, offset + n) as float, zeros from `end` on.
template <class T>
void widen_padded(const T* x, int64_t offset, int64_t end, int64_t n, float* out) {
  const int64_t count = std::clamp<int64_t>(end - offset, 0, n);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + offset + i));
  for (; i < count; ++i) out[i] = to_float(x[offset + i]);
  std::fill(out + count, out + n, 0.0f);
}

template <class Path, class T>
void quantize_row(const T* x, int64_t k, int64_t units, typename Path::Acts* out) {
  float group[kGroup];
  for (int64_t u = 0; u < units; ++u)
    for (int b = 0; b < Path::kBlocks; ++b)
      for (int g = 0; g < kGroups; ++g) {
        const int64_t offset = ((u * Path::kBlocks + b) * kGroups + g) * kGroup;
        widen_padded(x, offset, k, kGroup, group);
        out[u].put(b, g, quantize_group(group));
      }
}

template <class T>
void widen_row(const T* x, int64_t k, int64_t units, FloatPath::Acts* out) {
  widen_padded(x, 0, k, units * kSuperBlock, out->x);
}

// Fills `acts` with each row of x by row(x, acts), in parallel.
template <class Acts, class F>
void for_each_row(const Context& ctx, const Tensor& x, int64_t begin, int64_t end, Acts* acts,
                  int64_t units, F&& row) {
  const int64_t k = x.size(1);
  with_float_type(x.dtype, [&](auto t) {
    const auto* data = x.ptr<const decltype(t)>();
    ctx.parallel(end - begin, std::max<int64_t>(1, 32768 / k), [&](int64_t first, int64_t last) {
      for (int64_t m = first; m < last; ++m) row(data + (begin + m) * k, acts + m * units);
    });
  });
}

template <QType Q>
const void* quantize(const Context& ctx, const Tensor& x, int64_t begin, int64_t end, int64_t units,
                     Scratch& scratch) {
  using Path = Int8Path<Q>;
  auto* acts = scratch.get<typename Path::Acts>(static_cast<size_t>((end - begin) * units));
  for_each_row(ctx, x, begin, end, acts, units,
               [&](const auto* row, auto* out) { quantize_row<Path>(row, x.size(1), units, out); });
  return acts;
}

const void* widen(const Context& ctx, const Tensor& x, int64_t begin, int64_t end, int64_t units,
                  Scratch& scratch) {
  const int64_t k = x.size(1);
  if (x.dtype == DType::F32 && k % kSuperBlock == 0) return x.ptr<const float>() + begin * k;
  auto* acts = scratch.get<FloatPath::Acts>(static_cast<size_t>((end - begin) * units));
  for_each_row(ctx, x, begin, end, acts, units,
               [&](const auto* row, auto* out) { widen_row(row, k, units, out); });
  return acts;
}

// Calls f with the QType of an integer layout as a constant.
template <class F>
void with_int8_type(QType q, F&& f) {
  switch (q) {
    case QType::Q4_K:
      return f(std::integral_constant<QType, QType::Q4_K>{});
    case QType::Q5_K:
      return f(std::integral_constant<QType, QType::Q5_K>{});
    case QType::Q6_K:
      return f(std::integral_constant<QType, QType::Q6_K>{});
    default:
      return f(std::integral_constant<QType, QType::Q8_0>{});
  }
}

}  // namespace

ActLayout act_layout(QType q, bool exact) {
  if (exact || is_float(q)) return ActLayout::Float;
  return has_min(q) ? ActLayout::Min : q == QType::Q6_K ? ActLayout::Q6 : ActLayout::Q8;
}

Activations prepare_activations(const Context& ctx, const Tensor& x, int64_t begin, int64_t end,
                                QType q, Scratch& scratch) {
  Activations a;
  a.layout = act_layout(q, ctx.exact);
  a.rows = end - begin;
  if (a.layout == ActLayout::Float) {
    a.units = FloatPath::units(x.size(1));
    a.data = widen(ctx, x, begin, end, a.units, scratch);
    return a;
  }
  with_int8_type(q, [&](auto type) {
    a.units = Int8Path<type()>::units(x.size(1));
    a.data = quantize<type()>(ctx, x, begin, end, a.units, scratch);
  });
  return a;
}

void matmul_rows(const Activations& x, const QMatrix& w, int64_t begin, int64_t end, float* y,
                 int64_t y_stride) {
  if (x.layout == ActLayout::Float) return matmul(FloatPath(w.type), x, w, begin, end, y, y_stride);
  with_int8_type(w.type,
                 [&](auto type) { matmul(Int8Path<type()>(), x, w, begin, end, y, y_stride); });
}

}  // namespace glimmer::GLIMMER_ISA_NS
