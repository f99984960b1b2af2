// ExecuTorch's log, kept off the terminal: messages below Error are dropped, errors go into the
// exception of the call that caused them.
#pragma once

#include <string>

namespace glimmer {

// Takes over ExecuTorch's log output; again after another library did (its Python bindings do).
void install_log_filter();

// Collects the errors that ExecuTorch logs on this thread while it lives.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  // What was logged so far, "; " between messages.
  std::string take();

 private:
  friend struct LogSink;
  LogCapture* outer_;
  std::string text_;
};

}  // namespace glimmer
