// The engine and the wire as tables of C functions, filled in by address from Python: the backend links to torch alone.
#pragma once

#include <torch/extension.h>

#include <map>
#include <string>

namespace {

// The engine's C interface (csrc/comm.cpp), filled in by address from Python.
struct Engine {
  const char* (*error)(void*);
  void (*timeout)(void*, double);
  void (*abort)(void*, const char*);
  void (*destroy)(void*);
  double (*waited)(void*, double*);
  int (*allreduce)(void*, void*, int64_t, int, int, int);
  int (*reduce_scatter)(void*, const void* const*, void*, const int64_t*, int, int);
  int (*allgather)(void*, const void*, void* const*, const int64_t*);
  int (*broadcast)(void*, void*, int64_t, int);
  int (*gather)(void*, const void*, void* const*, int64_t, int);
  int (*scatter)(void*, const void* const*, void*, int64_t, int);
  int (*alltoall)(void*, const void* const*, const int64_t*, void* const*, const int64_t*);
  int (*barrier)(void*);
} engine;

void check(void* group, int code) {
  if (code) C10_THROW_ERROR(DistBackendError, std::string("ccl: ") + engine.error(group));
}

// A message is a broadcast between two ranks; its errors speak of what was asked for.
void check_message(void* group, int code) {
  if (!code) return;
  std::string why = engine.error(group);
  const std::pair<std::string, std::string> words[] = {{"broadcast of ", "message of "}, {" with root ", " from "}};
  for (const auto& [said, meant] : words)
    for (size_t at; (at = why.find(said)) != std::string::npos;) why.replace(at, said.size(), meant);
  C10_THROW_ERROR(DistBackendError, "ccl: " + why);
}

// oneCCL's door (oneccl.cpp), where there is one.
struct WireFunctions {
  const char* (*error)();
  int (*reduces)(int, int);
  void* (*allreduce)(void*, void*, int64_t, int, int);
  int (*wait)(void*, double);
  void (*leave)(void*, double);
} wire_functions;

template <typename F>
void set(F*& pointer, const std::map<std::string, uintptr_t>& table, const char* name) {
  pointer = reinterpret_cast<F*>(table.at(name));
}

void bind_engine(const std::map<std::string, uintptr_t>& table) {
  const auto take = [&](auto& pointer, const char* name) { set(pointer, table, name); };
  take(engine.error, "error");
  take(engine.timeout, "timeout");
  take(engine.abort, "abort");
  take(engine.destroy, "destroy");
  take(engine.waited, "waited");
  take(engine.allreduce, "allreduce");
  take(engine.reduce_scatter, "reduce_scatter");
  take(engine.allgather, "allgather");
  take(engine.broadcast, "broadcast");
  take(engine.gather, "gather");
  take(engine.scatter, "scatter");
  take(engine.alltoall, "alltoall");
  take(engine.barrier, "barrier");
}

void bind_wire(const std::map<std::string, uintptr_t>& table) {
  set(wire_functions.error, table, "error");
  set(wire_functions.reduces, table, "reduces");
  set(wire_functions.allreduce, table, "allreduce");
  set(wire_functions.wait, table, "wait");
  set(wire_functions.leave, table, "leave");
}

}  // namespace
