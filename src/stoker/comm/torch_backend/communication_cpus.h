// Where threads that communicate run: on the SMT siblings of the rank's cores, which arithmetic leaves idle.
#pragma once

#include <sched.h>

#include <cstdlib>

// STOKER_CCL_CPUS is a list such as 56-83 or 56,57,60-63, set by `stoker launch` (stoker.launch.placement.binding). Without it, or
// where it is refused, the calling thread stays where it is.
inline void move_to_communication_cpus() {
  const char* at = std::getenv("STOKER_CCL_CPUS");
  if (!at || !*at) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (;;) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) return;
    long last = first;
    if (*end == '-') {
      at = end + 1;
      last = std::strtol(at, &end, 10);
      if (end == at) return;
    }
    if (first < 0 || last < first || last >= CPU_SETSIZE) return;
    for (long cpu = first; cpu <= last; ++cpu) CPU_SET(cpu, &set);
    if (!*end) break;
    if (*end != ',') return;
    at = end + 1;
  }
  (void)sched_setaffinity(0, sizeof(set), &set);
}
