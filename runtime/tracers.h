// ExecuTorch event tracers that fill a Trace.
#pragma once

#include <executorch/runtime/core/event_tracer.h>

#include <memory>
#include <string>

#include "trace.h"

namespace glimmer {

class Tracer {
 public:
  virtual ~Tracer() = default;
  // Called before a method runs.
  void set_method(const char* method) { method_ = method; }
  // What was reported since the last take.
  virtual Trace take() = 0;

 protected:
  std::string method_;
};

// The tracer of a kind: ExecuTorch owns it, and `tracer` points to the same object. Null for
// TraceKind::None, which costs nothing.
std::unique_ptr<executorch::runtime::EventTracer> make_tracer(TraceKind kind, Tracer*& tracer);

}  // namespace glimmer
