// The C functions of oneccl.cpp, a library of its own: Python and the compiled backend bind from this file.
#pragma once

#include "stoker.h"

// Why the last call of this thread failed. Valid until the next one.
STOKER_API const char* stoker_oneccl_error(void);

// The size of the address that announce writes and join reads.
STOKER_API int64_t stoker_oneccl_address_bytes(void);

// The first rank: opens oneCCL's key-value store and writes its address, which all ranks pass to join. 0: done. 1: failed.
// 2: timed out.
STOKER_API int32_t stoker_oneccl_announce(char* address, double seconds);

// All ranks, together: a communicator, which leave frees; null on failure.
STOKER_API void* stoker_oneccl_join(int32_t rank, int32_t size, const char* address, double seconds);

// Whether allreduce supports this pair of a stoker_dtype and a stoker_reduction.
STOKER_API int32_t stoker_oneccl_reduces(int32_t dtype, int32_t op);

// In place; returns at once with a request, which must be passed to wait.
STOKER_API void* stoker_oneccl_allreduce(void* communicator, void* data, int64_t count, int32_t dtype, int32_t op);

// 0: done. 1: failed. 2: timed out. Frees the request.
STOKER_API int32_t stoker_oneccl_wait(void* request, double seconds);

// Frees the communicator, all ranks together. A communicator that has failed is never freed.
STOKER_API void stoker_oneccl_leave(void* communicator, double seconds);
