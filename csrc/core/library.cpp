// What the library says about itself, so that Python can tell a stale or foreign one before it calls anything else.
#include <omp.h>

#include "core/types.h"

// Raised whenever the signature or meaning of any exported function changes; kernels/native.py expects the same number.
STOKER_API int stoker_abi() { return 1; }

STOKER_API const char* stoker_isa() { return STOKER_ISA; }

// How many threads a parallel region really gets: proves which OpenMP pool the library runs on.
STOKER_API int stoker_count_threads(int threads) {
  int count = 0;
#pragma omp parallel num_threads(threads) reduction(+ : count)
  count += 1;
  return count;
}
