// AMX int8 tiles: four independent accumulators, as a matmul would use them.
#include "loops.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace glimmer::bench {
namespace {

constexpr int kRows = 16, kRowBytes = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

bool cpu_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 24 & 1) && (d >> 25 & 1);  // AMX-TILE, AMX-INT8
}

bool system_grants_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool amx_available() {
  static const bool available = cpu_has_amx() && system_grants_amx();
  return available;
}

__attribute__((target("amx-tile,amx-int8"))) int64_t amx_int8(int64_t rounds) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.rows[t] = kRows, config.row_bytes[t] = kRowBytes;
  // GCC 12 believes that _tile_loadconfig reads 8 bytes and drops the other stores.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  alignas(64) uint8_t data[kRows * kRowBytes];
  std::memset(data, 1, sizeof data);
  asm volatile("" ::"r"(data) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, data, kRowBytes);
  _tile_loadd(5, data, kRowBytes);
  _tile_loadd(6, data, kRowBytes);
  _tile_loadd(7, data, kRowBytes);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * kRows * (kRowBytes / 4) * kRowBytes * 2;  // 16 x 16 sums of 64 products
}

}  // namespace glimmer::bench
#else
namespace glimmer::bench {
bool amx_available() {
  return false;
}
int64_t amx_int8(int64_t) {
  return 0;
}
}  // namespace glimmer::bench
#endif
