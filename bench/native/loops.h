// The inner loops of the probes, compiled once per ISA as the kernels are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "glimmer/op.h"

namespace glimmer::bench {

// Streams that one thread reads side by side. One stream alone reads a third less: the hardware
// prefetchers follow several at once.
constexpr int kStreams = 8;

struct Loops {
  // Reads kStreams ranges of `stream` bytes (a multiple of 128), which lie one behind the other.
  // The result depends on every byte, so that nothing can be left out.
  uint64_t (*read)(const uint8_t* data, size_t stream);
  // A chain of multiply-adds in float32; returns the number of floating-point operations.
  int64_t (*fp32)(int64_t rounds);
  // Dot products of int8; returns the number of operations (a multiply and an add are two), or 0
  // where the ISA has no instruction for them.
  int64_t (*int8)(int64_t rounds);
};

#define GLIMMER_DECLARE_LOOPS(isa) \
  namespace isa {                  \
  extern const Loops kLoops;       \
  }
GLIMMER_DECLARE_LOOPS(scalar)
GLIMMER_DECLARE_LOOPS(avx2)
GLIMMER_DECLARE_LOOPS(avx512)
#undef GLIMMER_DECLARE_LOOPS

// AMX int8 tiles, where the CPU has them and the system grants their use.
bool amx_available();
int64_t amx_int8(int64_t rounds);

}  // namespace glimmer::bench
