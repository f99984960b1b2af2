// What every C++ kernel sees of a tensor: no torch, no executorch.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

namespace glimmer {

enum class DType : uint8_t { F32, F16, BF16, U8, I32, I64, Bool };

constexpr int64_t element_size(DType t) {
  switch (t) {
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::F16:
    case DType::BF16:
      return 2;
    case DType::I64:
      return 8;
    default:
      return 1;
  }
}

constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::F32:
      return "float32";
    case DType::F16:
      return "float16";
    case DType::BF16:
      return "bfloat16";
    case DType::U8:
      return "uint8";
    case DType::I32:
      return "int32";
    case DType::I64:
      return "int64";
    default:
      return "bool";
  }
}

constexpr bool is_float(DType t) {
  return t == DType::F32 || t == DType::F16 || t == DType::BF16;
}

constexpr int kMaxDims = 4;

// A dtype and a shape, without data: what an output must be.
struct Shape {
  DType dtype = DType::F32;
  int ndim = 0;
  int64_t sizes[kMaxDims] = {};
};

// A contiguous tensor. `name` is the schema's argument name, for error messages.
struct Tensor : Shape {
  const char* name = "";
  void* data = nullptr;

  int64_t size(int i) const { return sizes[i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= sizes[i];
    return n;
  }
  int64_t nbytes() const { return numel() * element_size(dtype); }
  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
};

using OptTensor = const Tensor*;  // nullptr when absent
using OptDouble = std::optional<double>;

inline std::string to_string(const Shape& s) {
  std::string r = std::string(dtype_name(s.dtype)) + "[";
  for (int i = 0; i < s.ndim; ++i) r += (i ? ", " : "") + std::to_string(s.sizes[i]);
  return r + "]";
}

inline Shape shape_of(DType dtype, std::initializer_list<int64_t> sizes) {
  Shape s;
  s.dtype = dtype;
  for (int64_t n : sizes) s.sizes[s.ndim++] = n;
  return s;
}

inline Shape shape_like(const Tensor& t) {
  return static_cast<const Shape&>(t);
}

// Ok, or one sentence that names the argument, what was expected and what was found.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(std::string message) {
    Status s;
    s.message_ = message.empty() ? "unknown error" : std::move(message);
    return s;
  }
  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

#define GLIMMER_RETURN_IF_ERROR(expr)                                      \
  do {                                                                     \
    if (::glimmer::Status status_ = (expr); !status_.ok()) return status_; \
  } while (0)

inline Status expect(bool ok, const Tensor& t, const std::string& expected) {
  if (ok) return {};
  return Status::error(std::string(t.name) + ": expected " + expected + ", found " + to_string(t));
}

inline Status expect_dims(const Tensor& t, int ndim) {
  return expect(t.ndim == ndim, t, std::to_string(ndim) + " dimensions");
}

inline Status expect_dtype(const Tensor& t, DType dtype) {
  return expect(t.dtype == dtype, t, dtype_name(dtype));
}

inline Status expect_float(const Tensor& t) {
  return expect(is_float(t.dtype), t, "float32, float16 or bfloat16");
}

inline Status expect_shape(const Tensor& t, const Shape& s) {
  bool same = t.dtype == s.dtype && t.ndim == s.ndim;
  for (int i = 0; same && i < s.ndim; ++i) same = t.sizes[i] == s.sizes[i];
  return expect(same, t, to_string(s));
}

}  // namespace glimmer
