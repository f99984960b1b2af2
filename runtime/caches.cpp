// The same step on the pools of both kinds of layers.
#include "caches.h"

#include <algorithm>
#include <limits>

namespace glimmer {
namespace {

constexpr LayerKind kKinds[] = {LayerKind::Global, LayerKind::Sliding};

}  // namespace

bool CacheLimits::has(LayerKind kind) const {
  const auto same = [kind](int64_t sliding) {
    return (sliding != 0) == (kind == LayerKind::Sliding);
  };
  return std::any_of(sliding_layers.begin(), sliding_layers.end(), same);
}

Caches::Caches(const CacheLimits& limits, PagePool::Config shape, const std::string& owner) {
  for (LayerKind kind : kKinds) {
    const bool sliding = kind == LayerKind::Sliding;
    if (limits.has(kind)) kinds_.push_back(kind);
    shape.name = owner + (sliding ? "sliding pages" : "global pages");
    shape.pages = limits.has(kind) ? (sliding ? limits.sliding_pages : limits.global_pages) : 0;
    shape.window = sliding ? limits.window : 0;
    pools_.emplace_back(shape);
  }
}

void Caches::reserve(int64_t slot, int64_t first_pos, int64_t n, const Copy& copy) {
  for (LayerKind kind : kinds_)
    for (const PageCopy& c : pool(kind).reserve(slot, first_pos, n)) copy(kind, c);
}

void Caches::commit(int64_t slot, int64_t n) {
  for (LayerKind kind : kinds_) pool(kind).commit(slot, n);
}

void Caches::truncate(int64_t slot, int64_t pos) {
  for (LayerKind kind : kinds_) pool(kind).truncate(slot, pos);
}

void Caches::share(int64_t src, int64_t dst, int64_t n) {
  for (LayerKind kind : kinds_) pool(kind).share(src, dst, n);
}

void Caches::release(int64_t slot) {
  for (LayerKind kind : kinds_) pool(kind).release(slot);
}

bool Caches::can_truncate(int64_t slot, int64_t pos) const {
  return std::all_of(kinds_.begin(), kinds_.end(),
                     [&](LayerKind kind) { return pool(kind).can_truncate(slot, pos); });
}

int64_t Caches::room(int64_t slot) const {
  int64_t room = std::numeric_limits<int64_t>::max();
  for (LayerKind kind : kinds_) room = std::min(room, pool(kind).room(slot));
  return room;
}

}  // namespace glimmer
