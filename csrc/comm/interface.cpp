// The C interface of the shared-memory engine. Every function that can fail returns 0 or a code of comm::Failure, and
// stoker_comm_error() tells why in a sentence.
#include <cstring>
#include <memory>
#include <string>

#include "comm/group.h"
#include "comm/reduce.h"
#include "core/types.h"

using namespace stoker::comm;

namespace {

thread_local std::string opening_error;

template <typename F>
int guarded(void* handle, F&& body) {
  Group& group = *static_cast<Group*>(handle);
  try {
    body(group);
    return 0;
  } catch (const Error& error) {
    group.last_error = error.what();
    return error.code;
  } catch (const std::exception& error) {
    group.last_error = error.what();
    return kSystem;
  }
}

void check_reduction(int type, int op) {
  if (!reducible(type, op))
    throw Error(kArgument, std::string(op_name(op)) + " of " + type_name(type) + " is not defined; floating-point types "
                "take sum, avg, product, min and max, integers all but avg and also and, or and xor");
}

template <typename F>
void* opened(F&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    opening_error = error.what();
    return nullptr;
  }
}

}  // namespace

// Raised whenever a function below changes its signature or meaning; comm/engine.py expects the same number.
STOKER_API int stoker_comm_abi() { return 1; }

STOKER_API const char* stoker_comm_opening_error() { return opening_error.c_str(); }

STOKER_API void* stoker_comm_create(int ranks, int rank, std::int64_t slot_bytes, int named) {
  return opened([&]() -> void* {
    if (ranks < 1 || ranks > kMostRanks) throw Error(kArgument, "a host may have 1 to 1024 ranks, not " + std::to_string(ranks));
    if (slot_bytes % 4096 || slot_bytes / ranks < 64) throw Error(kArgument, "slots must be whole pages with 64 bytes per rank");
    return new Group(Segment::create(ranks, slot_bytes, named != 0), rank);
  });
}

STOKER_API void* stoker_comm_attach(const char* address, int rank) {
  return opened([&]() -> void* { return new Group(Segment::attach(address), rank); });
}

STOKER_API const char* stoker_comm_address(void* group) { return static_cast<Group*>(group)->segment().address().c_str(); }
STOKER_API int stoker_comm_complete(void* group) { return static_cast<Group*>(group)->complete(); }
STOKER_API void stoker_comm_seal(void* group) { static_cast<Group*>(group)->segment().seal(); }
STOKER_API void stoker_comm_destroy(void* group) { delete static_cast<Group*>(group); }
STOKER_API void stoker_comm_abort(void* group, const char* why) { static_cast<Group*>(group)->abort(why); }
STOKER_API const char* stoker_comm_error(void* group) { return static_cast<Group*>(group)->last_error.c_str(); }
STOKER_API void stoker_comm_timeout(void* group, double seconds) { static_cast<Group*>(group)->set_timeout(seconds); }
STOKER_API void stoker_comm_names(void* group, const std::int64_t* ranks) { static_cast<Group*>(group)->set_names(ranks); }

// Seconds spent waiting so far; `for_rank`, if given, gets them by the rank waited for.
STOKER_API double stoker_comm_waited(void* handle, double* for_rank) {
  const Group& group = *static_cast<Group*>(handle);
  if (for_rank) std::memcpy(for_rank, group.waited_for(), sizeof(double) * static_cast<Group*>(handle)->segment().header().ranks);
  return group.waited();
}

STOKER_API int stoker_comm_allreduce(void* handle, void* data, std::int64_t count, int type, int op, int root) {
  return guarded(handle, [&](Group& group) {
    check_reduction(type, op);
    group.allreduce(data, count, type, op, root);
  });
}

STOKER_API int stoker_comm_reduce_scatter(void* handle, const void* const* from, void* to, const std::int64_t* counts,
                                          int type, int op) {
  return guarded(handle, [&](Group& group) {
    check_reduction(type, op);
    group.reduce_scatter(from, to, counts, type, op);
  });
}

STOKER_API int stoker_comm_allgather(void* handle, const void* from, void* const* to, const std::int64_t* bytes) {
  return guarded(handle, [&](Group& group) { group.allgather(from, to, bytes); });
}

STOKER_API int stoker_comm_broadcast(void* handle, void* data, std::int64_t bytes, int root) {
  return guarded(handle, [&](Group& group) { group.broadcast(data, bytes, root); });
}

STOKER_API int stoker_comm_gather(void* handle, const void* from, void* const* to, std::int64_t bytes, int root) {
  return guarded(handle, [&](Group& group) { group.gather(from, to, bytes, root); });
}

STOKER_API int stoker_comm_scatter(void* handle, const void* const* from, void* to, std::int64_t bytes, int root) {
  return guarded(handle, [&](Group& group) { group.scatter(from, to, bytes, root); });
}

STOKER_API int stoker_comm_alltoall(void* handle, const void* const* from, const std::int64_t* sent, void* const* to,
                                    const std::int64_t* received) {
  return guarded(handle, [&](Group& group) { group.alltoall(from, sent, to, received); });
}

STOKER_API int stoker_comm_barrier(void* handle) {
  return guarded(handle, [&](Group& group) { group.barrier(); });
}
