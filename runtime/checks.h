// Messages about a bad argument: its name, what was expected and what was found.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace glimmer {

[[noreturn]] inline void bad(const std::string& message) {
  throw std::invalid_argument(message);
}

inline std::string found(int64_t value) {
  return ", found " + std::to_string(value);
}

inline void check_range(const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    bad(name + ": expected a value in [" + std::to_string(low) + ", " + std::to_string(high) + "]" +
        found(value));
}

inline std::string indexed(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

}  // namespace glimmer
