// What a program can report of its calls: how long every instruction took, or what it computed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "glimmer/tensor.h"

namespace glimmer {

enum class TraceKind : uint8_t { None, Times, Outputs };

// One output of one instruction of a method, copied as it was when the instruction ended.
struct OpOutput {
  std::string method;
  int64_t chain = 0;
  int64_t instruction = 0;
  std::string event;  // what a delegate calls the op inside it; empty outside delegates
  Shape shape;
  std::vector<char> data;
};

struct Trace {
  std::string etdump;             // TraceKind::Times: one block a call, named after its method
  std::vector<OpOutput> outputs;  // TraceKind::Outputs: in the order of computation
};

// Nanoseconds of a tick, the unit of an ETDump's times.
double tick_nanoseconds();

}  // namespace glimmer
