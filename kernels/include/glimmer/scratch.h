// Growable aligned memory that a thread keeps between calls, and the switch that poisons it.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace glimmer {

// When on, every Scratch::get fills its memory with 0xFF (NaN as float, -1 as an integer), so that
// a kernel that reads what it did not write is found out. For tests; off by default.
void set_poison_scratch(bool on);
bool poison_scratch();

// Declare it `static thread_local`: one object per thread and purpose.
class Scratch {
 public:
  static constexpr size_t kAlign = 64;

  // Room for n elements of T, valid until the next get(). The contents are unspecified.
  template <class T>
  T* get(size_t n) {
    static_assert(alignof(T) <= kAlign);
    return static_cast<T*>(reserve(n * sizeof(T)));
  }

 private:
  void* reserve(size_t bytes) {
    if (bytes > capacity_) {
      data_.reset();
      capacity_ = 0;
      data_.reset(::operator new(bytes, std::align_val_t(kAlign)));
      capacity_ = bytes;
    }
    if (bytes && poison_scratch()) std::memset(data_.get(), 0xFF, bytes);
    return data_.get();
  }

  struct Delete {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(kAlign)); }
  };
  std::unique_ptr<void, Delete> data_;
  size_t capacity_ = 0;
};

}  // namespace glimmer
