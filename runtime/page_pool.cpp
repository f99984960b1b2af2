// Page tables with reference counts, copy on write and window-based freeing.
#include "page_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "checks.h"

namespace glimmer {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::string range(int64_t low, int64_t high) {
  return "[" + std::to_string(low) + ", " + std::to_string(high) + "]";
}

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

// splitmix64: a reproducible order on every platform.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

PagePool::PagePool(Config config) : config_(std::move(config)) {
  const std::string& name = config_.name;
  check_range(name + ": pages", config_.pages, 0, kMaxInt32);
  check_range(name + ": slots", config_.slots, 1, kMaxInt32);
  check_range(name + ": max_pages", config_.max_pages, 1, kMaxInt32 / config_.slots);
  check_range(name + ": page_size", config_.page_size, 1, kMaxInt32);
  check_range(name + ": window", config_.window, 0, kMaxInt32);
  table_.assign(static_cast<size_t>(config_.slots * config_.max_pages), -1);
  refcount_.assign(static_cast<size_t>(config_.pages), 0);
  slots_.resize(static_cast<size_t>(config_.slots));
  free_.resize(static_cast<size_t>(config_.pages));
  for (int64_t i = 0; i < config_.pages; ++i)
    free_[i] = static_cast<int32_t>(config_.pages - 1 - i);
  random_ = config_.seed.value_or(0);
}

std::vector<PageCopy> PagePool::reserve(int64_t slot, int64_t first_pos, int64_t n) {
  Slot& s = at("slot", slot);
  const int64_t size = config_.page_size;
  check_range(config_.name + ": first_pos", first_pos, 0, capacity() - 1);
  check_range(config_.name + ": n", n, 1, capacity() - first_pos);
  const int64_t begin = first_pos / size, end = (first_pos + n - 1) / size + 1;
  if (begin < s.first)
    fail("first_pos: expected at least " + std::to_string(s.first * size) +
         ", the oldest position that slot " + std::to_string(slot) + " still holds, found " +
         std::to_string(first_pos));
  if (first_pos > s.end * size)
    fail("first_pos: expected at most " + std::to_string(s.end * size) + ", the end of what slot " +
         std::to_string(slot) + " holds, found " + std::to_string(first_pos));

  std::vector<int64_t> shared;
  for (int64_t p = begin; p < std::min(end, s.end); ++p)
    if (refcount_[entry(slot, p)] > 1) shared.push_back(p);
  const int64_t needed = std::max<int64_t>(0, end - s.end) + static_cast<int64_t>(shared.size());
  if (needed > free_pages())
    throw std::runtime_error(
        config_.name + ": no free page: slot " + std::to_string(slot) + " needs " +
        std::to_string(needed) + " for positions " + range(first_pos, first_pos + n - 1) +
        ", found " + std::to_string(free_pages()) + " free of " + std::to_string(config_.pages));

  std::vector<PageCopy> copies;
  copies.reserve(shared.size());
  for (int64_t p : shared) {
    const int32_t src = entry(slot, p), dst = allocate();
    unref(src);
    entry(slot, p) = dst;
    copies.push_back({src, dst});
  }
  for (; s.end < end; ++s.end) entry(slot, s.end) = allocate();
  return copies;
}

void PagePool::commit(int64_t slot, int64_t n) {
  Slot& s = at("slot", slot);
  check_range(config_.name + ": n", n, 0, s.end * config_.page_size - s.length);
  s.length += n;
  const int64_t first = first_kept(s.length);
  if (first > s.first) {
    drop(slot, s.first, first);
    s.first = first;
  }
}

bool PagePool::can_truncate(int64_t slot, int64_t pos) const {
  const Slot& s = at("slot", slot);
  return pos >= 0 && pos <= s.length && (pos == 0 || first_visible_page(pos) >= s.first);
}

void PagePool::truncate(int64_t slot, int64_t pos) {
  Slot& s = at("slot", slot);
  check_range(config_.name + ": pos", pos, 0, s.length);
  if (!can_truncate(slot, pos))
    fail("pos: cannot roll slot " + std::to_string(slot) + " back from " +
         std::to_string(s.length) + " to " + std::to_string(pos) +
         ": its window needs positions before " + std::to_string(s.first * config_.page_size) +
         ", which were freed");
  const int64_t end = pages_for(pos);
  drop(slot, std::max(s.first, end), s.end);
  s = pos == 0 ? Slot{} : Slot{pos, s.first, end};
}

void PagePool::share(int64_t src, int64_t dst, int64_t n) {
  const Slot& from = at("src", src);
  Slot& to = at("dst", dst);
  if (to.end != 0)
    fail("dst: expected an empty slot, found slot " + std::to_string(dst) + " with " +
         std::to_string(to.length) + " tokens");
  if (src == dst) fail("dst: expected another slot than src, found " + std::to_string(dst));
  check_range(config_.name + ": n_tokens", n, 0, from.length);
  if (n == 0) return;
  if (first_visible_page(n) < from.first)
    fail("n_tokens: cannot share " + std::to_string(n) + " tokens of slot " + std::to_string(src) +
         ": their window needs positions before " + std::to_string(from.first * config_.page_size) +
         ", which were freed");
  to = {n, from.first, pages_for(n)};
  for (int64_t p = to.first; p < to.end; ++p) {
    entry(dst, p) = entry(src, p);
    ++refcount_[entry(src, p)];
  }
}

void PagePool::release(int64_t slot) {
  Slot& s = at("slot", slot);
  drop(slot, s.first, s.end);
  s = {};
}

int64_t PagePool::room(int64_t slot) const {
  const Slot& s = at("slot", slot);
  const int64_t begin = s.length / config_.page_size;
  int64_t end = begin, free = free_pages();
  for (; end < config_.max_pages; ++end) {
    const bool present = end < s.end;
    if (present && refcount_[table_[slot * config_.max_pages + end]] == 1) continue;
    if (free-- == 0) break;  // a new page, or a copy of a shared one
  }
  return std::max<int64_t>(0, end * config_.page_size - s.length);
}

int64_t PagePool::length(int64_t slot) const {
  return at("slot", slot).length;
}

int64_t PagePool::refcount(int64_t page) const {
  check_range(config_.name + ": page", page, 0, config_.pages - 1);
  return refcount_[page];
}

int64_t PagePool::sliding_pages(int64_t window, int64_t max_chunk, int64_t slots,
                                int64_t page_size) {
  check_range("window", window, 1, kMaxInt32);
  check_range("max_chunk", max_chunk, 1, kMaxInt32);
  check_range("slots", slots, 1, kMaxInt32);
  check_range("page_size", page_size, 1, kMaxInt32);
  // Before a step of n tokens a slot keeps at most the last window + kRollback - 1 positions and
  // what shares a page with them; p consecutive positions touch at most ceil((p - 1) / size) + 1
  // pages. Sharing only lowers the number of distinct pages.
  const int64_t positions = window + kRollback - 1 + std::max(max_chunk, kRollback);
  const int64_t pages = ceil_div(positions - 1, page_size) + 1;
  check_range("slots", slots, 1, kMaxInt32 / pages);
  return slots * pages;
}

PagePool::Slot& PagePool::at(const char* argument, int64_t slot) {
  check_range(config_.name + ": " + argument, slot, 0, config_.slots - 1);
  return slots_[slot];
}

const PagePool::Slot& PagePool::at(const char* argument, int64_t slot) const {
  return const_cast<PagePool*>(this)->at(argument, slot);
}

int64_t PagePool::pages_for(int64_t tokens) const {
  return ceil_div(tokens, config_.page_size);
}

// The first logical page that a slot of this committed length keeps.
int64_t PagePool::first_kept(int64_t length) const {
  const int64_t invisible = length - config_.window - kRollback + 1;  // positions from 0 on
  return config_.window == 0 || invisible <= 0 ? 0 : invisible / config_.page_size;
}

// The logical page of the oldest key that a query at pos sees.
int64_t PagePool::first_visible_page(int64_t pos) const {
  if (config_.window == 0) return 0;
  return std::max<int64_t>(0, pos - config_.window + 1) / config_.page_size;
}

int32_t PagePool::allocate() {
  if (config_.seed) std::swap(free_[next_random(random_) % free_.size()], free_.back());
  const int32_t page = free_.back();
  free_.pop_back();
  refcount_[page] = 1;
  return page;
}

void PagePool::unref(int32_t page) {
  if (--refcount_[page] == 0) free_.push_back(page);
}

// From the last page to the first: the next slot then gets them in ascending order again.
void PagePool::drop(int64_t slot, int64_t begin, int64_t end) {
  for (int64_t p = end - 1; p >= begin; --p) {
    unref(entry(slot, p));
    entry(slot, p) = -1;
  }
}

void PagePool::fail(const std::string& message) const {
  throw std::invalid_argument(config_.name + ": " + message);
}

}  // namespace glimmer
