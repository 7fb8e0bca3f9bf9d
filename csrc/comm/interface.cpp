// The C functions of the shared-memory collectives: exceptions become codes and error messages.
#include <memory>
#include <string>

#include "comm/group.h"
#include "comm/rank_reduction.h"
#include "core/parallel.h"

using namespace stoker::comm;

namespace {

thread_local std::string opening_error;

template <typename F>
int32_t collective(void* handle, F&& body) {
  Group& group = *static_cast<Group*>(handle);
  try {
    body(group);
    return 0;
  } catch (const Error& error) {
    group.last_error = error.what();
    return error.code;
  } catch (const std::exception& error) {
    group.last_error = error.what();
    return STOKER_COMM_SYSTEM;
  }
}

void check_reduction(int type, int op) {
  if (!reducible(type, op))
    throw Error(STOKER_COMM_ARGUMENT, std::string(op_name(op)) + " of " + type_name(type) + " is not defined; floating-point types "
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

STOKER_API const char* stoker_comm_opening_error() { return opening_error.c_str(); }

STOKER_API void* stoker_comm_create(int32_t ranks, int32_t rank, int64_t slot_bytes, int32_t named) {
  return opened([&]() -> void* {
    if (ranks < 1 || ranks > kMostRanks)
      throw Error(STOKER_COMM_ARGUMENT, "a host may have 1 to 1024 ranks, not " + std::to_string(ranks));
    if (slot_bytes % 4096 || slot_bytes / ranks < 64)
      throw Error(STOKER_COMM_ARGUMENT, "slots must be whole pages with 64 bytes per rank");
    return new Group(Segment::create(ranks, slot_bytes, named != 0), rank);
  });
}

STOKER_API void* stoker_comm_attach(const char* address, int32_t rank) {
  return opened([&]() -> void* { return new Group(Segment::attach(address), rank); });
}

STOKER_API const char* stoker_comm_address(void* group) { return static_cast<Group*>(group)->segment().address().c_str(); }
STOKER_API int32_t stoker_comm_await_all(void* group, double seconds) { return static_cast<Group*>(group)->await_all(seconds); }
STOKER_API void stoker_comm_seal(void* group) { static_cast<Group*>(group)->segment().seal(); }
STOKER_API void stoker_comm_destroy(void* group) { delete static_cast<Group*>(group); }
STOKER_API void stoker_comm_abort(void* group, const char* why) {
  stoker::guarded([&] { static_cast<Group*>(group)->abort(why); });
}
STOKER_API const char* stoker_comm_error(void* group) { return static_cast<Group*>(group)->last_error.c_str(); }
STOKER_API void stoker_comm_timeout(void* group, double seconds) { static_cast<Group*>(group)->set_timeout(seconds); }
STOKER_API void stoker_comm_names(void* group, const int64_t* ranks) {
  stoker::guarded([&] { static_cast<Group*>(group)->set_names(ranks); });  // if there is no memory, error messages keep the old names
}

STOKER_API int32_t stoker_comm_allreduce(void* handle, void* data, int64_t count, int32_t dtype, int32_t op, int32_t root) {
  return collective(handle, [&](Group& group) {
    check_reduction(dtype, op);
    group.allreduce(data, count, dtype, op, root);
  });
}

STOKER_API int32_t stoker_comm_reduce_scatter(void* handle, const void* const* sources, void* to, const int64_t* counts,
                                              int32_t dtype, int32_t op) {
  return collective(handle, [&](Group& group) {
    check_reduction(dtype, op);
    group.reduce_scatter(sources, to, counts, dtype, op);
  });
}

STOKER_API int32_t stoker_comm_allgather(void* handle, const void* source, void* const* to, const int64_t* bytes) {
  return collective(handle, [&](Group& group) { group.allgather(source, to, bytes); });
}

STOKER_API int32_t stoker_comm_broadcast(void* handle, void* data, int64_t bytes, int32_t root) {
  return collective(handle, [&](Group& group) { group.broadcast(data, bytes, root); });
}

STOKER_API int32_t stoker_comm_gather(void* handle, const void* source, void* const* to, int64_t bytes, int32_t root) {
  return collective(handle, [&](Group& group) { group.gather(source, to, bytes, root); });
}

STOKER_API int32_t stoker_comm_scatter(void* handle, const void* const* sources, void* to, int64_t bytes, int32_t root) {
  return collective(handle, [&](Group& group) { group.scatter(sources, to, bytes, root); });
}

STOKER_API int32_t stoker_comm_alltoall(void* handle, const void* const* sources, const int64_t* sent, void* const* to,
                                        const int64_t* received) {
  return collective(handle, [&](Group& group) { group.alltoall(sources, sent, to, received); });
}

STOKER_API int32_t stoker_comm_barrier(void* handle) {
  return collective(handle, [&](Group& group) { group.barrier(); });
}

STOKER_API int64_t stoker_comm_write(void* handle, int32_t to, const void* data, int64_t bytes) {
  try {
    return static_cast<Group*>(handle)->write(to, data, bytes);
  } catch (const std::exception& error) {
    opening_error = error.what();
    return -1;
  }
}

STOKER_API int64_t stoker_comm_read(void* handle, int32_t source, void* data, int64_t bytes) {
  return static_cast<Group*>(handle)->read(source, data, bytes);
}

STOKER_API int64_t stoker_comm_bell(void* handle) { return static_cast<Group*>(handle)->bell(); }
STOKER_API int32_t stoker_comm_sleep(void* handle, int64_t seen, double seconds) {
  return static_cast<Group*>(handle)->sleep(static_cast<uint32_t>(seen), seconds);
}
STOKER_API void stoker_comm_ring(void* handle) { static_cast<Group*>(handle)->ring(); }
STOKER_API const char* stoker_comm_gone(void* handle, int32_t rank) { return static_cast<Group*>(handle)->gone(rank); }
