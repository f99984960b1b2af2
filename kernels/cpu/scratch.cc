#include "glimmer/scratch.h"

#include <atomic>

namespace glimmer {
namespace {

std::atomic<bool> g_poison{false};

}  // namespace

void set_poison_scratch(bool on) {
  g_poison.store(on, std::memory_order_relaxed);
}
bool poison_scratch() {
  return g_poison.load(std::memory_order_relaxed);
}

}  // namespace glimmer
