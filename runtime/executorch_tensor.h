// An ExecuTorch tensor as the kernels see it.
#pragma once

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>

#include <optional>

#include "glimmer/tensor.h"

namespace glimmer {

inline std::optional<DType> to_dtype(executorch::aten::ScalarType t) {
  using executorch::aten::ScalarType;
  switch (t) {
    case ScalarType::Float:
      return DType::F32;
    case ScalarType::Half:
      return DType::F16;
    case ScalarType::BFloat16:
      return DType::BF16;
    case ScalarType::Byte:
      return DType::U8;
    case ScalarType::Int:
      return DType::I32;
    case ScalarType::Long:
      return DType::I64;
    case ScalarType::Bool:
      return DType::Bool;
    default:
      return std::nullopt;
  }
}

// Sets everything of `out` but its name, which errors use.
inline Status to_tensor(const executorch::aten::Tensor& t, Tensor& out) {
  const std::string name = *out.name ? out.name : "a tensor";
  const std::optional<DType> dtype = to_dtype(t.scalar_type());
  if (!dtype) {
    const int code = static_cast<int>(t.scalar_type());
    return Status::error(name + ": unsupported dtype, ScalarType " + std::to_string(code));
  }
  if (t.dim() > kMaxDims)
    return Status::error(name + ": expected at most 4 dimensions, found " +
                         std::to_string(t.dim()));
  if (!executorch::runtime::is_contiguous_dim_order(t.dim_order().data(), t.dim()))
    return Status::error(name + ": expected a contiguous tensor");
  out.dtype = *dtype;
  out.ndim = static_cast<int>(t.dim());
  for (int i = 0; i < out.ndim; ++i) out.sizes[i] = t.size(i);
  out.data = const_cast<void*>(t.const_data_ptr());
  return {};
}

}  // namespace glimmer
