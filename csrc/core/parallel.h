// Loops over OpenMP's threads, which no exception may leave, and the guard of every kernel's C function. The pool is torch's own
// (see kernels/native.py). Python passes its size down with every call: torch.set_num_threads is a setting of each thread.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <new>

#include "core/virtual_threads.h"
#include "stoker.h"

namespace stoker {

// What a C function returns for `body`: no exception may reach its caller. `kernel` is the name of that function.
template <typename F>
inline int32_t guarded(F&& body, const char* kernel = __builtin_FUNCTION()) noexcept {
  if (VirtualRegion::count()) VirtualRegion::enter(kernel);
  try {
    body();
    return STOKER_OK;
  } catch (const std::bad_alloc&) {
    return STOKER_OUT_OF_MEMORY;
  } catch (...) {
    return STOKER_FAILED;
  }
}

// The first exception of a parallel region. One that leaves the region itself would end the process.
class FirstException {
 public:
  template <typename F>
  void run(F&& f) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      f();
    } catch (...) {
      if (!failed_.exchange(true)) first_ = std::current_exception();
    }
  }
  void rethrow() const {  // after the region
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr first_;
};

// One thread or all of them, for `work` elements of cheap arithmetic. Waking threads costs a few microseconds; 16k elements are about
// that much work for one. Never some of them: libgomp ends the threads that a smaller team leaves idle and creates them again for the
// next large one, which costs several times as much as waking all.
inline int threads_for(int64_t work, int threads) {
  constexpr int kEnough = 4;
  return work / 16384 + 1 >= std::min(threads, kEnough) ? std::max(threads, 1) : 1;
}

// f(begin, end) over contiguous pieces of [0, n), one per thread. For work whose result does not depend on the split. `where` and
// `line` are the caller's.
template <typename F>
inline void parallel_ranges(int64_t n, int threads, F&& f, const char* where = __builtin_FUNCTION(), int line = __builtin_LINE()) {
  if (n <= 0) return;
  if (VirtualRegion::count()) {
    VirtualRegion region(Schedule::kRanges, threads, n, where, line);
    for (int64_t me = 0, count = std::max(threads, 1); me < count; ++me)
      if (n * me / count < n * (me + 1) / count) region.run([&] { f(n * me / count, n * (me + 1) / count); });
    return;
  }
  if (threads <= 1) {
    f(int64_t{0}, n);
    return;
  }
  FirstException trouble;
#pragma omp parallel num_threads(threads)
  {
    const int64_t count = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t begin = n * me / count, end = n * (me + 1) / count;
    if (begin < end) trouble.run([&] { f(begin, end); });
  }
  trouble.rethrow();
}

// f(task) for each task in [0, n), handed out one at a time: for tasks of unequal size, or cores of unequal speed.
template <typename F>
inline void parallel_tasks(int64_t n, int threads, F&& f, const char* where = __builtin_FUNCTION(), int line = __builtin_LINE()) {
  if (VirtualRegion::count()) {
    VirtualRegion region(Schedule::kTasks, threads, n, where, line);
    for (int64_t task = 0; task < n; ++task) region.run([&] { f(task); });
    return;
  }
  if (threads <= 1 || n <= 1) {
    for (int64_t task = 0; task < n; ++task) f(task);
    return;
  }
  FirstException trouble;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t task = 0; task < n; ++task) trouble.run([&] { f(task); });
  trouble.rethrow();
}

// f(), which divides its work itself among as many threads.
template <typename F>
inline void parallel_elsewhere(int threads, F&& f, const char* where = __builtin_FUNCTION(), int line = __builtin_LINE()) {
  if (!VirtualRegion::count()) return f();
  VirtualRegion region(Schedule::kEven, threads, 0, where, line);
  region.run(f);
}

}  // namespace stoker
