// Checks an ExecuTorch data file (.ptd) before ExecuTorch reads it, which it does without checks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace glimmer {

struct FlatTensorEntry {
  std::string key;
  uint64_t bytes = 0;
};

// Every tensor of the file. Throws std::invalid_argument, naming the file, when it is
// missing, truncated or damaged.
std::vector<FlatTensorEntry> read_flat_tensor_entries(const std::string& path);
std::vector<std::string> read_flat_tensor_keys(const std::string& path);

// The size of a regular file, as these checks report it.
uint64_t checked_file_size(const std::string& path);
// Throws unless [base, base + length) lies within `size` bytes.
void check_extent(const std::string& path, uint64_t size, uint64_t base, uint64_t length);

}  // namespace glimmer
