// Where the key and value of a position live, and the checks that keep every access in bounds.
//
// Paged: cache [pages, kv_heads, page_size, head_dim]; block_table [slots, max_pages] maps logical
// page pos / page_size of a slot to a physical page, -1 when absent.
// Contiguous (no table): cache [slots, kv_heads, cache_len, head_dim]; position p is at row
// p mod cache_len. It is the paged form with page_size = cache_len whose every logical page of a
// slot is physical page `slot`, so kernels share everything but the address function.
#pragma once

#include <cstdint>
#include <string>

#include "glimmer/op.h"

namespace glimmer::GLIMMER_ISA_NS {

constexpr int64_t kMaxPos = int64_t{1} << 62;  // so that pos + 1 and pos - window cannot overflow

struct PagedCache {
  const int32_t* table = nullptr;  // nullptr: contiguous
  int64_t slots = 0, max_pages = 0;
  int64_t pages = 0, kv_heads = 0, page_size = 0, head_dim = 0;

  PagedCache(const Tensor& cache, OptTensor block_table)
      : table(block_table ? block_table->ptr<int32_t>() : nullptr),
        slots(block_table ? block_table->size(0) : cache.size(0)),
        max_pages(block_table ? block_table->size(1) : 0),
        pages(cache.size(0)),
        kv_heads(cache.size(1)),
        page_size(cache.size(2)),
        head_dim(cache.size(3)) {}

  int64_t physical_page(int64_t slot, int64_t pos) const {
    return table ? table[slot * max_pages + pos / page_size] : slot;
  }
  // Identifies the (page, row) that a position occupies.
  int64_t physical_row(int64_t slot, int64_t pos) const {
    return physical_page(slot, pos) * page_size + pos % page_size;
  }
  // Element offset of a position's row for one kv head.
  int64_t offset(int64_t slot, int64_t pos, int64_t kv_head) const {
    return ((physical_page(slot, pos) * kv_heads + kv_head) * page_size + pos % page_size) *
           head_dim;
  }
};

// Shapes and dtypes of k_cache, v_cache, block_table, pos and slot for a call of `tokens` tokens.
inline Status check_cache_args(const Tensor& k_cache, const Tensor& v_cache, OptTensor block_table,
                               const Tensor& pos, const Tensor& slot, int64_t tokens) {
  GLIMMER_RETURN_IF_ERROR(expect_float(k_cache));
  GLIMMER_RETURN_IF_ERROR(expect_dims(k_cache, 4));
  GLIMMER_RETURN_IF_ERROR(
      expect(k_cache.size(1) > 0 && k_cache.size(2) > 0 && k_cache.size(3) > 0, k_cache,
             "[pages, kv_heads, page_size, head_dim] with the last three above 0"));
  GLIMMER_RETURN_IF_ERROR(expect_shape(v_cache, shape_like(k_cache)));
  if (block_table) {
    GLIMMER_RETURN_IF_ERROR(expect_dtype(*block_table, DType::I32));
    GLIMMER_RETURN_IF_ERROR(expect_dims(*block_table, 2));
  }
  GLIMMER_RETURN_IF_ERROR(expect_shape(pos, shape_of(DType::I64, {tokens})));
  return expect_shape(slot, shape_of(DType::I64, {tokens}));
}

inline std::string token_name(const char* argument, int64_t token) {
  return std::string(argument) + ": token " + std::to_string(token) + ": ";
}

// That slot and pos of one token are in range. Says nothing of padding (slot -1), which has no pos.
inline Status check_position(const PagedCache& cache, int64_t token, int64_t slot, int64_t pos) {
  if (slot < -1 || slot >= cache.slots)
    return Status::error(token_name("slot", token) + "expected -1 (padding) or 0 <= slot < " +
                         std::to_string(cache.slots) + ", found " + std::to_string(slot));
  if (slot < 0) return {};
  const int64_t limit_pos = cache.table ? cache.max_pages * cache.page_size : kMaxPos;
  if (pos >= 0 && pos < limit_pos) return {};
  const std::string limit = cache.table ? " < " + std::to_string(cache.max_pages) + " pages of " +
                                              std::to_string(cache.page_size)
                                        : " < 2^62";
  return Status::error(token_name("pos", token) + "expected 0 <= pos" + limit + ", found " +
                       std::to_string(pos));
}

// That every page that holds positions [begin, end) of a slot is in the pool.
inline Status check_pages(const PagedCache& cache, int64_t token, int64_t slot, int64_t begin,
                          int64_t end) {
  if (!cache.table) return {};
  for (int64_t p = begin / cache.page_size; p * cache.page_size < end; ++p) {
    const int64_t page = cache.table[slot * cache.max_pages + p];
    if (page < 0 || page >= cache.pages)
      return Status::error("block_table: token " + std::to_string(token) + " needs page " +
                           std::to_string(p) + " of slot " + std::to_string(slot) +
                           ": expected 0 <= page < " + std::to_string(cache.pages) + ", found " +
                           std::to_string(page) + (page == -1 ? " (absent)" : ""));
  }
  return {};
}

}  // namespace glimmer::GLIMMER_ISA_NS
