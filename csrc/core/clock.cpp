// The clock the cores really run at, without which a share of the peak would be a share of a number on the box: boost and
// virtual machines make the nominal clock wrong in both directions.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "core/parallel.h"

namespace {

constexpr int kUnroll = 16;
constexpr std::int64_t kRounds = 1 << 16;  // 1 M additions: about 0.3 ms, long for the timer, short for the scheduler

// A chain of additions of two registers takes one cycle each on every CPU of the last twenty years (an addition of a
// constant does not: some cores fold those away).
double chain_ghz() {
#if defined(__x86_64__) || defined(__aarch64__)
  std::uint64_t sum = 1, step = 3;
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < kRounds; ++i) {
#if defined(__x86_64__)
    asm volatile(".rept 16\n\taddq %1, %0\n\t.endr" : "+r"(sum) : "r"(step) : "cc");
#else
    asm volatile(".rept 16\n\tadd %0, %0, %1\n\t.endr" : "+r"(sum) : "r"(step));
#endif
  }
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() > 0 ? double(kRounds) * kUnroll / taken.count() : 0.0;
#else
  return 0.0;
#endif
}

}  // namespace

// The best of several trials per thread, since whatever interrupts a trial can only make it look slower.
STOKER_API int32_t stoker_clock(double* ghz, int32_t threads) {
  return stoker::guarded([&] {
    constexpr int kTrials = 128;
    std::vector<double> best(std::max(threads, 1), 0.0);
    stoker::parallel_ranges(static_cast<int64_t>(best.size()), threads, [&](int64_t begin, int64_t) {
      double mine = 0.0;
      for (int trial = 0; trial < kTrials; ++trial) mine = std::max(mine, chain_ghz());
      best[begin] = mine;
    });
    double sum = 0.0;
    int counted = 0;
    for (double value : best) {
      sum += value;
      counted += value > 0.0;
    }
    *ghz = counted ? sum / counted : 0.0;
  });
}
