// The Python module glimmer_ops._bench: what this machine can do at most, a few milliseconds a
// call, on ExecuTorch's thread pool as the kernels are, so that no second pool competes with it.
#include <pybind11/pybind11.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "glimmer/registry.h"
#include "loops.h"
#include "op_call.h"
#include "threads.h"

namespace py = pybind11;

namespace glimmer::bench {
namespace {

constexpr size_t kPage = 4096;

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

const Loops& best_loops() {
  switch (available_isas().back()) {
#if defined(GLIMMER_BUILT_AVX512)
    case Isa::Avx512:
      return avx512::kLoops;
#endif
#if defined(GLIMMER_BUILT_AVX2)
    case Isa::Avx2:
      return avx2::kLoops;
#endif
    default:
      return scalar::kLoops;
  }
}

// Runs body(i) for each thread i of the pool, and gives the time of all.
template <class F>
int64_t time_threads(F&& body) {
  const int64_t n = thread_count();
  auto each = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  };
  auto nothing = [](int64_t, int64_t) {};
  const Context context = host_context();
  context.parallel(n, 1, nothing);  // wakes the pool
  const int64_t start = now_ns();
  context.parallel(n, 1, each);
  return now_ns() - start;
}

// Memory to read from: touched, in huge pages where the system gives them.
class Stream {
 public:
  explicit Stream(size_t bytes) : size_(bytes / kPage * kPage) {
    if (size_ < 1 << 20) throw py::value_error("Stream: expected 1 MiB or more");
    void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
    madvise(p, size_, MADV_HUGEPAGE);
#endif
    std::memset(data_, 1, size_);
  }
  ~Stream() { munmap(data_, size_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Reads about `bytes` beyond what the last call read, round and round. (bytes read, ns)
  py::tuple read(size_t bytes) {
    const size_t threads = static_cast<size_t>(thread_count());
    size_t pages = std::min(bytes, size_) / threads / kStreams / kPage;
    if (pages == 0) throw py::value_error("Stream.read: expected more bytes");
    pages -= pages > 1 && pages % 2 == 0;  // an even distance puts all streams in the same sets
    const size_t part = pages * kPage * kStreams;
    if (at_ + part * threads > size_) at_ = 0;
    const uint8_t* base = data_ + at_;
    at_ += part * threads;
    std::atomic<uint64_t> sink{0};
    int64_t ns;
    {
      py::gil_scoped_release release;
      const Loops& loops = best_loops();
      ns = time_threads([&](int64_t i) { sink ^= loops.read(base + i * part, pages * kPage); });
    }
    return py::make_tuple(part * threads, ns);
  }

 private:
  size_t size_;
  size_t at_ = 0;
  uint8_t* data_ = nullptr;
};

// Operations a nanosecond of all threads, in a run of about 2 ms.
double rate(int64_t (*loop)(int64_t)) {
  py::gil_scoped_release release;
  int64_t start = now_ns();
  if (loop(1000) == 0) return 0.0;
  const int64_t rounds = 1000 * 2'000'000 / std::max<int64_t>(1, now_ns() - start);
  std::atomic<int64_t> operations{0};
  const int64_t ns =
      time_threads([&](int64_t) { operations += loop(std::max<int64_t>(1, rounds)); });
  return static_cast<double>(operations) / static_cast<double>(ns);
}

double int8_peak() {
  return rate(amx_available() ? amx_int8 : best_loops().int8);
}

// Independent adds a cycle, in units of the three cycles that a multiplication takes: about the
// core's width when it is alone, half of it when a neighbour shares the core. The clock rate
// cancels out; the best of a few tries, since an interrupt would count as slow adds or slow
// multiplications. 0 where the instructions are not known.
double ipc() {
#if defined(__x86_64__) || defined(__aarch64__)
  constexpr int kRounds = 1000, kTries = 5;
#if defined(__x86_64__)
#define GLIMMER_ADD "add $1,%0\n add $1,%1\n add $1,%2\n add $1,%3\n add $1,%4\n"
#define GLIMMER_MUL "imul %0,%0\n"
#else
#define GLIMMER_ADD "add %0,%0,1\n add %1,%1,1\n add %2,%2,1\n add %3,%3,1\n add %4,%4,1\n"
#define GLIMMER_MUL "mul %0,%0,%0\n"
#endif
  uint64_t a = 1, b = 1, c = 1, d = 1, e = 1;
  int64_t add = INT64_MAX, mul = INT64_MAX;
  for (int t = 0; t < kTries; ++t) {
    const int64_t t0 = now_ns();
    for (int i = 0; i < kRounds; ++i)
      asm volatile(GLIMMER_ADD GLIMMER_ADD GLIMMER_ADD GLIMMER_ADD
                   : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e));
    const int64_t t1 = now_ns();
    for (int i = 0; i < kRounds; ++i)
      asm volatile(GLIMMER_MUL GLIMMER_MUL GLIMMER_MUL GLIMMER_MUL : "+r"(a));
    add = std::min(add, t1 - t0);
    mul = std::min(mul, now_ns() - t1);
  }
#undef GLIMMER_ADD
#undef GLIMMER_MUL
  constexpr double kAdds = 20, kMulCycles = 4 * 3;
  return mul / kMulCycles / (std::max<int64_t>(1, add) / kAdds);
#else
  return 0.0;
#endif
}

}  // namespace
}  // namespace glimmer::bench

PYBIND11_MODULE(_bench, m) {
  using namespace glimmer::bench;
  m.doc() = "Probes of memory bandwidth, arithmetic peaks and the core's freedom.";
  py::class_<Stream>(m, "Stream")
      .def(py::init<size_t>(), py::arg("bytes"))
      .def("read", &Stream::read, py::arg("bytes"), "(bytes read, ns) of the next part.");
  m.def("fp32_peak", [] { return rate(best_loops().fp32); }, "GFLOP/s of float32 multiply-adds.");
  m.def("int8_peak", &int8_peak, "Gop/s of int8 dot products; 0 without an instruction for them.");
  m.def("amx", &amx_available, "Whether int8_peak is that of AMX tiles.");
  m.def("ipc", &ipc, "Independent adds a cycle; halved by a neighbour on the same core.");
}
