// A bounds-checked reader of the FlatTensor flatbuffer at the head of a .ptd file.
//
// Layout: executorch/extension/flat_tensor/serialize/flat_tensor.fbs. Flatbuffers: a table starts
// with the signed distance to its vtable (u16 vtable size, u16 table size, u16 offset of each
// field, 0 when absent); tables, vectors and strings are referred to by unsigned distances.
#include "flat_tensor.h"

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/flat_tensor/serialize/flat_tensor_header.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <stdexcept>

#include "executorch_log.h"

namespace glimmer {
namespace {

using executorch::extension::FlatTensorHeader;
using executorch::extension::MmapDataLoader;
using SegmentInfo = executorch::runtime::DataLoader::SegmentInfo;

[[noreturn]] void bad_file(const std::string& path, const std::string& message) {
  throw std::invalid_argument(path + ": " + message);
}

// Bytes of an element of executorch_flatbuffer.ScalarType; 0 for types that the runtime lacks.
uint64_t element_bytes(int8_t type) {
  switch (type) {
    case 0:   // byte
    case 1:   // char
    case 11:  // bool
      return 1;
    case 2:   // short
    case 5:   // half
    case 15:  // bfloat16
    case 27:  // uint16
      return 2;
    case 3:   // int
    case 6:   // float
    case 28:  // uint32
      return 4;
    case 4:   // long
    case 7:   // double
    case 29:  // uint64
      return 8;
    default:
      return 0;
  }
}

class Reader {
 public:
  Reader(std::string path, const uint8_t* data, uint64_t size)
      : path_(std::move(path)), data_(data), size_(size) {}

  [[noreturn]] void damaged(const std::string& what) const {
    bad_file(path_, "is damaged: " + what);
  }

  template <class T>
  T read(uint64_t at) const {
    if (at > size_ || sizeof(T) > size_ - at) damaged("a table points outside of it");
    T value;
    std::memcpy(&value, data_ + at, sizeof value);
    return value;
  }

  uint64_t follow(uint64_t at) const { return at + read<uint32_t>(at); }

  // Every field of a table must lie in it, and it in the file, whether we read the field or not.
  uint64_t table(uint64_t at) const {
    const int64_t vtable = static_cast<int64_t>(at) - read<int32_t>(at);
    if (vtable < 0) damaged("a table points outside of it");
    const uint64_t v = static_cast<uint64_t>(vtable);
    const uint64_t fields_end = read<uint16_t>(v), table_size = read<uint16_t>(v + 2);
    if (fields_end < 4 || fields_end > size_ - v || table_size < 4 || table_size > size_ - at)
      damaged("a table is longer than it");
    for (uint64_t entry = 4; entry + 2 <= fields_end; entry += 2)
      if (read<uint16_t>(v + entry) >= table_size) damaged("a field lies outside of its table");
    return at;
  }

  // Where field `index` of a table is, if it is present.
  std::optional<uint64_t> field(uint64_t table, int index) const {
    const int64_t vtable = static_cast<int64_t>(table) - read<int32_t>(table);
    if (vtable < 0) damaged("a table points outside of it");
    const uint64_t v = static_cast<uint64_t>(vtable), entry = 4 + 2 * static_cast<uint64_t>(index);
    if (entry + 2 > read<uint16_t>(v)) return {};
    const uint16_t offset = read<uint16_t>(v + entry);
    if (offset == 0) return {};
    return table + offset;
  }

  template <class T>
  T scalar(uint64_t table, int index) const {
    const auto at = field(table, index);
    return at ? read<T>(*at) : T{};
  }

  struct Vector {
    uint64_t begin = 0;
    uint64_t size = 0;
  };
  // Elements of a vector field, all inside the file.
  Vector vector(uint64_t table, int index, uint64_t bytes) const {
    const auto at = field(table, index);
    if (!at) return {};
    const uint64_t start = follow(*at), n = read<uint32_t>(start);
    if (n * bytes > size_ - (start + 4)) damaged("a list is longer than it");
    return {start + 4, n};
  }

  std::string string(uint64_t table, int index) const {
    const Vector v = vector(table, index, 1);
    if (v.size == 0) damaged("a tensor has no key");
    if (read<uint8_t>(v.begin + v.size) != 0) damaged("a key has no end");
    return {reinterpret_cast<const char*>(data_) + v.begin, v.size};
  }

 private:
  std::string path_;
  const uint8_t* data_;
  uint64_t size_;
};

// Bytes of the tensor, whose layout table holds dtype, sizes and the order of dimensions.
uint64_t layout_bytes(const Reader& r, uint64_t layout, const std::string& key) {
  if (!r.field(layout, 1) || !r.field(layout, 2)) r.damaged(key + " has no shape");
  const auto sizes = r.vector(layout, 1, 4), order = r.vector(layout, 2, 1);
  uint64_t bytes = element_bytes(r.scalar<int8_t>(layout, 0));
  if (bytes == 0) r.damaged(key + " has an unknown dtype");
  if (order.size != sizes.size || sizes.size > 16) r.damaged(key + " has a wrong shape");
  uint32_t seen = 0;
  for (uint64_t i = 0; i < sizes.size; ++i) {
    const int32_t size = r.read<int32_t>(sizes.begin + 4 * i);
    const uint8_t dim = r.read<uint8_t>(order.begin + i);
    if (size < 0 || dim >= sizes.size || (seen >> dim) & 1) r.damaged(key + " has a wrong shape");
    seen |= 1u << dim;
    if (size > 0 && bytes > (uint64_t{1} << 62) / static_cast<uint32_t>(size))
      r.damaged(key + " has a wrong shape");
    bytes *= static_cast<uint32_t>(size);
  }
  return bytes;
}

std::vector<uint64_t> segment_sizes(const Reader& r, uint64_t root, uint64_t data_size) {
  const auto segments = r.vector(root, 1, 4);
  std::vector<uint64_t> sizes;
  for (uint64_t i = 0; i < segments.size; ++i) {
    const uint64_t table = r.table(r.follow(segments.begin + 4 * i));
    const uint64_t offset = r.scalar<uint64_t>(table, 0), size = r.scalar<uint64_t>(table, 1);
    if (offset > data_size || size > data_size - offset) r.damaged("a segment ends outside of it");
    sizes.push_back(size);
  }
  return sizes;
}

std::vector<FlatTensorEntry> read_entries(const Reader& r, uint64_t data_size) {
  const uint64_t root = r.table(r.follow(0));
  r.scalar<uint32_t>(root, 0);  // the version, which ExecuTorch reads
  const std::vector<uint64_t> sizes = segment_sizes(r, root, data_size);
  const auto entries = r.vector(root, 2, 4);
  if (entries.size == 0) r.damaged("it holds no tensor");
  std::vector<FlatTensorEntry> result;
  for (uint64_t i = 0; i < entries.size; ++i) {
    const uint64_t table = r.table(r.follow(entries.begin + 4 * i));
    const std::string key = r.string(table, 0);
    const uint32_t segment = r.scalar<uint32_t>(table, 1);
    if (segment >= sizes.size()) r.damaged(key + " has no data");
    // Optional in the format, but ExecuTorch reads it without asking whether it is there
    const auto layout = r.field(table, 2);
    if (!layout) r.damaged(key + " has no shape");
    const uint64_t bytes = layout_bytes(r, r.table(r.follow(*layout)), key);
    if (bytes > sizes[segment]) r.damaged(key + " is larger than its data");
    result.push_back({key, bytes});
  }
  return result;
}

}  // namespace

uint64_t checked_file_size(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) bad_file(path, "expected a file, found none");
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) bad_file(path, "cannot be read: " + error.message());
  return size;
}

void check_extent(const std::string& path, uint64_t size, uint64_t base, uint64_t length) {
  if (base > size || length > size - base)
    bad_file(path, "is truncated: expected at least " + std::to_string(base) + " + " +
                       std::to_string(length) + " bytes, found " + std::to_string(size));
}

std::vector<FlatTensorEntry> read_flat_tensor_entries(const std::string& path) {
  const uint64_t size = checked_file_size(path);
  if (size < FlatTensorHeader::kNumHeadBytes)
    bad_file(path, "expected an ExecuTorch data file, found " + std::to_string(size) + " bytes");
  LogCapture log;
  auto loader = MmapDataLoader::from(path.c_str(), MmapDataLoader::MlockConfig::NoMlock);
  if (!loader.ok()) bad_file(path, "cannot be read: " + log.take());
  const auto load = [&](uint64_t bytes) {
    auto data = loader->load(0, bytes, SegmentInfo(SegmentInfo::Type::External));
    if (!data.ok()) bad_file(path, "cannot be read: " + log.take());
    return std::move(*data);
  };
  const auto head = load(FlatTensorHeader::kNumHeadBytes);
  const auto header = FlatTensorHeader::Parse(head.data(), head.size());
  if (!header.ok()) bad_file(path, "expected an ExecuTorch data file, found another kind of file");
  check_extent(path, size, header->flatbuffer_offset, header->flatbuffer_size);
  check_extent(path, size, header->segment_base_offset, header->segment_data_size);
  const auto tables = load(header->flatbuffer_offset + header->flatbuffer_size);
  return read_entries(Reader(path, static_cast<const uint8_t*>(tables.data()), tables.size()),
                      header->segment_data_size);
}

std::vector<std::string> read_flat_tensor_keys(const std::string& path) {
  std::vector<std::string> keys;
  for (const FlatTensorEntry& entry : read_flat_tensor_entries(path)) keys.push_back(entry.key);
  return keys;
}

}  // namespace glimmer
