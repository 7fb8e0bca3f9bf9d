// The engine (stoker.h) and the wire (oneccl.h) as tables of C functions, filled in by address from Python: the backend links
// to torch alone.
#pragma once

#include <torch/extension.h>

#include <map>
#include <string>

#include "oneccl.h"
#include "stoker.h"

namespace {

#define STOKER_ENGINE(X)                                                                                                   \
  X(error) X(timeout) X(abort) X(destroy) X(waited) X(allreduce) X(reduce_scatter) X(allgather) X(broadcast) X(gather)     \
  X(scatter) X(alltoall) X(barrier)
#define STOKER_WIRE(X) X(error) X(reduces) X(allreduce) X(wait) X(leave)

struct Engine {
#define STOKER_POINTER(name) decltype(&stoker_comm_##name) name;
  STOKER_ENGINE(STOKER_POINTER)
#undef STOKER_POINTER
} engine;

struct WireFunctions {
#define STOKER_POINTER(name) decltype(&stoker_oneccl_##name) name;
  STOKER_WIRE(STOKER_POINTER)
#undef STOKER_POINTER
} wire_functions;

using Addresses = std::map<std::string, uintptr_t>;

void bind_engine(const Addresses& table) {
#define STOKER_BIND(name) engine.name = reinterpret_cast<decltype(engine.name)>(table.at("stoker_comm_" #name));
  STOKER_ENGINE(STOKER_BIND)
#undef STOKER_BIND
}

void bind_wire(const Addresses& table) {
#define STOKER_BIND(name) wire_functions.name = reinterpret_cast<decltype(wire_functions.name)>(table.at("stoker_oneccl_" #name));
  STOKER_WIRE(STOKER_BIND)
#undef STOKER_BIND
}

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

}  // namespace
