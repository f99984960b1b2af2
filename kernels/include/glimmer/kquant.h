// GGUF weight types: block layouts, sizes of rows, and the checks that every op on them shares.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <optional>
#include <string_view>

#include "glimmer/half.h"
#include "glimmer/tensor.h"

namespace glimmer {

enum class QType : uint8_t { Q4_K, Q5_K, Q6_K, Q8_0, F16, BF16, F32 };

// Rows may start at any byte, so blocks are made of bytes only.
// Q4_K and Q5_K: weight = d · scale[s] · q - dmin · min[s] for each sub-block s of 32, with 6-bit
// scales and mins packed in 12 bytes.
struct BlockQ4K {
  uint8_t d[2], dmin[2];
  uint8_t scales[12];
  uint8_t qs[128];  // bytes 32p...: low nibbles are sub-block 2p, high nibbles 2p + 1
};
struct BlockQ5K {
  uint8_t d[2], dmin[2];
  uint8_t scales[12];
  uint8_t qh[32];  // bit s of byte l is bit 4 of element l of sub-block s
  uint8_t qs[128];
};
// weight = d · scale[s] · (q - 32) for each sub-block s of 16.
struct BlockQ6K {
  uint8_t ql[128];  // per half of 128: low nibbles are quarters 0, 1, high nibbles 2, 3
  uint8_t qh[64];   // per half: bits 2i, 2i + 1 of byte l are bits 4, 5 of quarter i, element l
  int8_t scales[16];
  uint8_t d[2];
};
struct BlockQ80 {
  uint8_t d[2];
  int8_t qs[32];
};
static_assert(sizeof(BlockQ4K) == 144 && alignof(BlockQ4K) == 1);
static_assert(sizeof(BlockQ5K) == 176 && alignof(BlockQ5K) == 1);
static_assert(sizeof(BlockQ6K) == 210 && alignof(BlockQ6K) == 1);
static_assert(sizeof(BlockQ80) == 34 && alignof(BlockQ80) == 1);

constexpr int64_t kSuperBlock = 256;

struct QTypeInfo {
  const char* name;
  int64_t block;  // weights
  int64_t bytes;  // of a block
};

// In the order of QType.
constexpr QTypeInfo kQTypes[] = {
    {"Q4_K", 256, sizeof(BlockQ4K)},
    {"Q5_K", 256, sizeof(BlockQ5K)},
    {"Q6_K", 256, sizeof(BlockQ6K)},
    {"Q8_0", 32, sizeof(BlockQ80)},
    {"F16", 1, 2},
    {"BF16", 1, 2},
    {"F32", 1, 4},
};

constexpr const QTypeInfo& info(QType q) {
  return kQTypes[static_cast<int>(q)];
}
constexpr bool is_float(QType q) {
  return q == QType::F16 || q == QType::BF16 || q == QType::F32;
}
// Bytes of `k` weights, k a multiple of the block.
constexpr int64_t row_bytes(QType q, int64_t k) {
  return k / info(q).block * info(q).bytes;
}

inline std::optional<QType> find_qtype(std::string_view name) {
  for (int i = 0; i < static_cast<int>(std::size(kQTypes)); ++i)
    if (name == kQTypes[i].name) return static_cast<QType>(i);
  return std::nullopt;
}

// `arg` is the name of the argument that holds the type's name.
inline Status parse_qtype(const char* arg, std::string_view name, QType& out) {
  if (const auto q = find_qtype(name)) {
    out = *q;
    return {};
  }
  std::string names;
  for (const QTypeInfo& q : kQTypes) names += (names.empty() ? "" : ", ") + std::string(q.name);
  return Status::error(std::string(arg) + ": expected one of " + names + ", found '" +
                       std::string(name) + "'");
}

// Encoded rows, checked.
struct QMatrix {
  QType type = QType::F32;
  const uint8_t* data = nullptr;
  int64_t n = 0;  // rows
  int64_t k = 0;  // weights in a row
  int64_t stride = 0;

  const uint8_t* row(int64_t i) const { return data + i * stride; }
};

inline Status check_qrows(const Tensor& weight) {
  GLIMMER_RETURN_IF_ERROR(expect_dtype(weight, DType::U8));
  return expect_dims(weight, 2);
}

// Weight rows that multiply the rows of x, [M, K].
inline Status check_qmatrix(const Tensor& x, const Tensor& weight, const char* qtype_arg,
                            std::string_view qtype, QMatrix& out) {
  GLIMMER_RETURN_IF_ERROR(expect_float(x));
  GLIMMER_RETURN_IF_ERROR(expect_dims(x, 2));
  GLIMMER_RETURN_IF_ERROR(parse_qtype(qtype_arg, qtype, out.type));
  GLIMMER_RETURN_IF_ERROR(check_qrows(weight));
  const QTypeInfo& q = info(out.type);
  const int64_t k = x.size(1);
  if (k <= 0 || k % q.block != 0)
    return expect(false, x,
                  "rows of a multiple of " + std::to_string(q.block) + " elements for " + q.name);
  const int64_t stride = row_bytes(out.type, k);
  if (weight.size(1) != stride)
    return expect(false, weight,
                  "rows of " + std::to_string(stride) + " bytes for " + std::to_string(k) + " " +
                      q.name + " weights");
  out.data = weight.ptr<const uint8_t>();
  out.n = weight.size(0);
  out.k = k;
  out.stride = stride;
  return {};
}

inline float half_at(const uint8_t* p) {
  f16 h;
  std::memcpy(&h.bits, p, 2);
  return to_float(h);
}

// The 6-bit scales and mins of Q4_K and Q5_K, one byte each, sub-block 0 in the lowest byte.
// Bytes 0-3 hold scales 0-3 and the top bits of scales 4-7, bytes 4-7 the same of the mins, bytes
// 8-11 the low nibbles of scales 4-7 (low half) and of mins 4-7 (high half).
struct SubScales {
  uint64_t scales, mins;
};
inline SubScales unpack_scales(const uint8_t* packed) {
  uint32_t a, b, c;
  std::memcpy(&a, packed, 4);
  std::memcpy(&b, packed + 4, 4);
  std::memcpy(&c, packed + 8, 4);
  const uint64_t high_scales = (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u);
  const uint64_t high_mins = ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u);
  return {(a & 0x3f3f3f3fu) | (high_scales << 32), (b & 0x3f3f3f3fu) | (high_mins << 32)};
}
constexpr int byte_of(uint64_t v, int i) {
  return static_cast<int>((v >> (8 * i)) & 0xff);
}

}  // namespace glimmer
