// What the library says about itself, so that Python can tell a stale or foreign one before it calls anything else.
#include <atomic>

#include "core/parallel.h"

STOKER_API const char* stoker_header_hash() { return STOKER_HEADER_HASH; }

STOKER_API const char* stoker_isa() { return STOKER_ISA; }

STOKER_API int32_t stoker_count_threads(int32_t threads) {
  std::atomic<int32_t> count{0};
  stoker::parallel_ranges(threads, threads, [&](int64_t, int64_t) { ++count; });
  return count;
}
