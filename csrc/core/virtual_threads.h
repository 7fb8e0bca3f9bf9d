// Virtual threads: what a parallel region would take on more threads than this machine has.
//
// The calling thread runs the pieces of a region one after the other and reads its own CPU clock between them. From those times
// follows the makespan: when the last of `threads` threads would be finished, if tasks are handed out as OpenMP does. Regions with
// the same place in the source are added up. Left out: caches and memory that threads share, clocks that fall when many cores are
// busy, and the cost of waking threads (cost_of_region in kernels/virtual_threads.py). Of a region of a few microseconds per piece the
// makespan is too long: one piece's data happen to be in this core's cache, another's not.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace stoker {

enum class Schedule {
  kTasks,   // one at a time to the first thread that is free
  kRanges,  // one piece per thread
  kEven,    // divided by code that is not ours: taken as divided evenly
};

class VirtualRegion {
 public:
  // How many threads to compute for; 0: regions run on real threads.
  static int count() { return count_; }
  static void set_count(int count);
  // The kernel that the calling thread is in; returns the one before.
  static const char* enter(const char* kernel);

  // `units`: how many pieces the work could be cut into.
  VirtualRegion(Schedule schedule, int threads, int64_t units, const char* where, int line);
  ~VirtualRegion();

  template <typename F>
  void run(F&& f) {
    const double begin = now();
    std::forward<F>(f)();
    add(now() - begin);
  }

 private:
  static double now();
  void add(double seconds);
  double makespan() const;

  static int count_;

  const Schedule schedule_;
  const int threads_, line_;
  const int64_t units_;
  const char* const where_;
  const double begin_;
  std::vector<double> pieces_;
};

}  // namespace stoker
