// The page tables of one model: a pool of pages for its global layers and one for its sliding ones.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "page_pool.h"

namespace glimmer {

enum class LayerKind : uint8_t { Global, Sliding };

struct CacheLimits {
  int64_t global_pages = 0;
  int64_t sliding_pages = 0;
  int64_t window = 0;  // a query sees keys less than `window` behind; 0: no layer is sliding
  std::vector<int64_t>
      sliding_layers;  // one entry a layer: 1 for a sliding one, 0 for a global one

  int64_t n_layers() const { return static_cast<int64_t>(sliding_layers.size()); }
  bool has(LayerKind kind) const;
};

class Caches {
 public:
  using Copy = std::function<void(LayerKind kind, PageCopy copy)>;

  // `shape` gives slots, max_pages, page_size and seed; `owner` begins the pools' names.
  Caches(const CacheLimits& limits, PagePool::Config shape, const std::string& owner);

  // Of every kind that the model has, as PagePool's; `copy` is called for every page to copy.
  void reserve(int64_t slot, int64_t first_pos, int64_t n, const Copy& copy);
  void commit(int64_t slot, int64_t n);
  void truncate(int64_t slot, int64_t pos);
  void share(int64_t src, int64_t dst, int64_t n);
  void release(int64_t slot);
  bool can_truncate(int64_t slot, int64_t pos) const;
  int64_t room(int64_t slot) const;

  const PagePool& pool(LayerKind kind) const { return pools_[static_cast<int>(kind)]; }
  const std::vector<int32_t>& table(LayerKind kind) const { return pool(kind).table(); }

 private:
  std::vector<LayerKind> kinds_;  // those that the model has
  std::vector<PagePool> pools_;   // by kind
  PagePool& pool(LayerKind kind) { return pools_[static_cast<int>(kind)]; }
};

}  // namespace glimmer
