// How a process waits for another in shared memory: spinning, sleeping on a futex, and noticing that the other has died.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "comm/segment.h"

namespace stoker::comm {

constexpr int kLongestSpin = 2048;  // pauses: 30 to 60 us, about what another core needs for a piece
constexpr int kShortestSpin = 16;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

inline long futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, long microseconds) {
  const timespec slice{microseconds / 1000000, microseconds % 1000000 * 1000};
  return futex(&word, FUTEX_WAIT, value, &slice);
}

// Whether the process of `block` is known to have died without leaving the group. A process in another pid namespace, or one
// whose /proc entry cannot be read, may be alive: then only the timeout helps.
inline bool has_died(const RankBlock& block, const RankBlock& own) {
  const std::uint64_t started = block.started.load();
  if (block.state.load() == 0 || !started || !block.pids.load() || block.pids.load() != own.pids.load()) return false;
  const std::uint64_t now = process_start(block.pid);
  const bool gone = now ? now != started : errno == ESRCH;
  return gone && block.state.load() == 1;
}

}  // namespace stoker::comm
