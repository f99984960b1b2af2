// Page tables of one kind of layer (global or sliding window): which physical page of the pools
// holds which positions of which slot. Pure bookkeeping on the host; it never touches K or V.
//
// A slot's pages are always a contiguous run of logical pages, so that every position between the
// oldest one kept and the newest one reserved has memory. Bad arguments throw
// std::invalid_argument and a lack of pages std::runtime_error; both leave the pool unchanged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace glimmer {

constexpr int64_t kPageSize = 64;
// Positions behind the committed length whose windows stay intact: what a rejected verification
// block of 16 rows rolls back to.
constexpr int64_t kRollback = 16;

// A copy of one page, in every layer of the pool's kind, that must precede the next step.
struct PageCopy {
  int64_t src;
  int64_t dst;
};

class PagePool {
 public:
  struct Config {
    std::string name = "pool";  // for messages
    int64_t pages = 0;          // physical pages
    int64_t slots = 0;
    int64_t max_pages = 0;  // logical pages of a slot
    int64_t page_size = kPageSize;
    int64_t window = 0;            // a query sees keys less than `window` behind; 0: all of them
    std::optional<uint64_t> seed;  // hand pages out in a random, reproducible order
  };

  explicit PagePool(Config config);

  // Makes positions [first_pos, first_pos + n) of a slot writable: allocates the absent pages and
  // replaces the shared ones by private pages, whose contents the caller must copy first. All or
  // nothing.
  std::vector<PageCopy> reserve(int64_t slot, int64_t first_pos, int64_t n);
  // Appends n reserved tokens to the committed length. With a window, frees logical page p iff
  // (p + 1) * page_size - 1 <= length - window - kRollback: no query at a position >=
  // length - kRollback sees it.
  void commit(int64_t slot, int64_t n);
  // Rolls back to `pos` committed tokens and drops the pages that hold none of them.
  void truncate(int64_t slot, int64_t pos);
  // Lets the empty slot dst start with the first n tokens of src, without copying them.
  void share(int64_t src, int64_t dst, int64_t n);
  // Drops everything the slot holds.
  void release(int64_t slot);

  // int32 [slots, max_pages]: the physical page, or -1.
  const std::vector<int32_t>& table() const { return table_; }
  int64_t length(int64_t slot) const;
  int64_t refcount(int64_t page) const;
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t used_pages() const { return config_.pages - free_pages(); }
  // Whether truncate(slot, pos) would succeed.
  bool can_truncate(int64_t slot, int64_t pos) const;
  // The most tokens that reserve(slot, length(slot), n) has pages for.
  int64_t room(int64_t slot) const;
  const Config& config() const { return config_; }

  // Physical pages that suffice for `slots` sequences of any length, whatever the positions, in
  // steps of at most max_chunk tokens a slot (and of at most kRollback verification rows).
  static int64_t sliding_pages(int64_t window, int64_t max_chunk, int64_t slots,
                               int64_t page_size = kPageSize);

 private:
  struct Slot {
    int64_t length = 0;  // committed tokens
    int64_t first = 0;   // logical pages [first, end) are present
    int64_t end = 0;
  };

  Slot& at(const char* argument, int64_t slot);
  const Slot& at(const char* argument, int64_t slot) const;
  int32_t& entry(int64_t slot, int64_t page) { return table_[slot * config_.max_pages + page]; }
  int64_t capacity() const { return config_.max_pages * config_.page_size; }
  int64_t pages_for(int64_t tokens) const;
  int64_t first_kept(int64_t length) const;
  int64_t first_visible_page(int64_t pos) const;
  int32_t allocate();
  void unref(int32_t page);
  void drop(int64_t slot, int64_t begin, int64_t end);
  [[noreturn]] void fail(const std::string& message) const;

  Config config_;
  std::vector<int32_t> table_;
  std::vector<int32_t> refcount_;
  std::vector<int32_t> free_;  // the next page is the last one
  std::vector<Slot> slots_;
  uint64_t random_ = 0;
};

}  // namespace glimmer
