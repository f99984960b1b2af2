// Replaces the log function of ExecuTorch's platform layer.
#include "executorch_log.h"

#include <executorch/runtime/platform/platform.h>

#include <cstdio>
#include <utility>

namespace glimmer {

namespace {
thread_local LogCapture* t_capture = nullptr;
}

struct LogSink {
  static void emit(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*,
                   size_t line, const char* message, size_t length) {
    if (level != kError && level != kFatal) return;
    if (!t_capture || level == kFatal) {
      std::fprintf(stderr, "executorch: %s:%zu: %.*s\n", file, line, static_cast<int>(length),
                   message);
      return;
    }
    std::string& text = t_capture->text_;
    if (!text.empty()) text += "; ";
    text.append(message, length);
  }
};

// register_pal() logs an error when a platform is already registered, through the function that is
// about to be replaced; the table that it writes to is the one that get_pal_impl() shows.
void install_log_filter() {
  auto* table = const_cast<executorch::runtime::PalImpl*>(executorch::runtime::get_pal_impl());
  if (table) table->emit_log_message = &LogSink::emit;
}

LogCapture::LogCapture() : outer_(std::exchange(t_capture, this)) {
  install_log_filter();
}

LogCapture::~LogCapture() {
  t_capture = outer_;
}

std::string LogCapture::take() {
  return std::exchange(text_, {});
}

namespace {
const bool g_installed = (install_log_filter(), true);
}

}  // namespace glimmer
