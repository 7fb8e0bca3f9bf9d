// A plain C interface to oneCCL, whose own is C++: allreduce between the leaders of hosts, nothing else.
//
// Compiled on first use against the oneCCL that is installed (see ../oneccl.py). One thread makes all calls of oneCCL and
// advances its operations, so that callers can reduce the next piece meanwhile, and operations of several groups may start in
// any order. A wait ends at its deadline: oneCCL itself waits for ever for a host that has died.
#include <oneapi/ccl.hpp>

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "communication_cpus.h"
#include "oneccl.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Communicator {
  std::shared_ptr<ccl::kvs> store;
  std::optional<ccl::communicator> ranks;
};

struct Task {
  std::function<ccl::event()> begin;  // starts an operation
  std::function<void()> run;          // or a call that blocks until it is done
  std::optional<ccl::event> event;
  std::string error;
  bool done = false, abandoned = false;
};
using Shared = std::shared_ptr<Task>;

thread_local std::string last_error;

class Driver {
 public:
  void give(const Shared& task) {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (!started_) std::thread([this] { drive(); }).detach();  // it may be stuck in oneCCL when the process ends
    started_ = true;
    fresh_.push_back(task);
    change_.notify_all();
  }

  // 0: done. 1: failed. 2: not done within `seconds`.
  int await(const Shared& task, double seconds) {
    std::unique_lock<std::mutex> hold(mutex_);
    if (!change_.wait_for(hold, std::chrono::duration<double>(std::min(seconds, 1e8)), [&] { return task->done; })) {
      task->abandoned = true;
      last_error = "no answer from another host within " + std::to_string(static_cast<int>(seconds)) + " s";
      return 2;
    }
    last_error = task->error;
    return task->error.empty() ? 0 : 1;
  }

 private:
  void drive() {
    move_to_communication_cpus();
    prctl(PR_SET_TIMERSLACK, 1000UL);  // in ns; by default a sleep of 20 us takes 70, too long for a fast network
    int idle = 0;
    for (;;) {
      Shared task;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        if (active_.empty()) change_.wait(hold, [this] { return !fresh_.empty(); });
        // A blocking call waits until no operation is active: another host may need this one to get that far too.
        if (!fresh_.empty() && (fresh_.front()->begin || active_.empty())) {
          task = fresh_.front();
          fresh_.pop_front();
        }
      }
      if (task) start(task);
      idle = advance() || task ? 0 : idle + 1;
      if (idle > kSpins)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      else if (idle)
        std::this_thread::yield();
    }
  }

  void start(const Shared& task) {
    const bool failed = !attempt(task, [&] {
      if (task->begin)
        task->event.emplace(task->begin());
      else
        task->run();
    });
    if (failed || task->run)
      finish(task);
    else
      active_.push_back(task);
  }

  bool advance() {
    bool any = false;
    for (auto at = active_.begin(); at != active_.end();) {
      bool over = (*at)->abandoned;
      if (!over) over = !attempt(*at, [&] { over = (*at)->event->test(); }) || over;
      if (over) {
        if ((*at)->abandoned) new std::optional<ccl::event>(std::move((*at)->event));  // leaked: oneCCL may still write to it
        finish(*at);
        at = active_.erase(at);
        any = true;
      } else {
        ++at;
      }
    }
    return any;
  }

  template <typename F>
  static bool attempt(const Shared& task, F&& body) {
    try {
      body();
      return true;
    } catch (const std::exception& error) {
      task->error = error.what();
    } catch (...) {
      task->error = "oneCCL failed without a message";
    }
    return false;
  }

  void finish(const Shared& task) {
    const std::lock_guard<std::mutex> hold(mutex_);
    task->begin = nullptr;
    task->done = true;
    change_.notify_all();
  }

  static constexpr int kSpins = 200;
  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Shared> fresh_;
  std::list<Shared> active_;
  bool started_ = false;
};

// Never destroyed, because its thread may outlive main().
Driver& driver() {
  static Driver* const one = new Driver;
  return *one;
}

// oneCCL prints to stdout that its log level was set; what it prints while it starts goes to stderr.
void initialise() {
  static bool done = false;
  if (done) return;
  std::fflush(stdout);
  const int kept = dup(1);
  dup2(2, 1);
  try {
    ccl::init();
    done = true;
  } catch (...) {
    std::cout.flush();
    dup2(kept, 1);
    close(kept);
    throw;
  }
  std::cout.flush();
  std::fflush(stdout);
  dup2(kept, 1);
  close(kept);
}

std::shared_ptr<ccl::kvs> announced_store;  // kept by the first rank between announce() and join()

// Indexed by stoker_dtype and stoker_reduction; -1: oneCCL has no equivalent.
constexpr int kTypes[] = {
    static_cast<int>(ccl::datatype::float32), static_cast<int>(ccl::datatype::float64),
    static_cast<int>(ccl::datatype::bfloat16), static_cast<int>(ccl::datatype::float16),
    static_cast<int>(ccl::datatype::int8), static_cast<int>(ccl::datatype::uint8),
    static_cast<int>(ccl::datatype::int16), static_cast<int>(ccl::datatype::int32),
    static_cast<int>(ccl::datatype::int64), -1,
};
constexpr int kOps[] = {
    static_cast<int>(ccl::reduction::sum), -1, static_cast<int>(ccl::reduction::prod), static_cast<int>(ccl::reduction::min),
    static_cast<int>(ccl::reduction::max), -1, -1, -1,
};

int blocking(double seconds, std::function<void()> run) {
  const auto task = std::make_shared<Task>();
  task->run = std::move(run);
  driver().give(task);
  return driver().await(task, seconds);
}

}  // namespace

STOKER_API const char* stoker_oneccl_error() { return last_error.c_str(); }

STOKER_API int64_t stoker_oneccl_address_bytes() { return ccl::kvs::address_max_size; }

STOKER_API int32_t stoker_oneccl_announce(char* address, double seconds) {
  const auto found = std::make_shared<ccl::kvs::address_type>();
  const int code = blocking(seconds, [found] {
    initialise();
    announced_store = ccl::create_main_kvs();
    *found = announced_store->get_address();
  });
  if (!code) std::memcpy(address, found->data(), found->size());
  return code;
}

STOKER_API void* stoker_oneccl_join(int32_t rank, int32_t size, const char* address, double seconds) {
  const auto communicator = std::make_shared<Communicator>();
  ccl::kvs::address_type where;
  std::memcpy(where.data(), address, where.size());
  const int code = blocking(seconds, [communicator, where, rank, size] {
    initialise();
    communicator->store = rank == 0 ? std::move(announced_store) : ccl::create_kvs(where);
    communicator->ranks.emplace(ccl::create_communicator(size, rank, communicator->store));
  });
  return code ? nullptr : new Communicator(std::move(*communicator));
}

STOKER_API int32_t stoker_oneccl_reduces(int32_t dtype, int32_t op) {
  return dtype >= 0 && dtype < int(std::size(kTypes)) && op >= 0 && op < int(std::size(kOps)) && kTypes[dtype] >= 0 && kOps[op] >= 0;
}

STOKER_API void* stoker_oneccl_allreduce(void* handle, void* data, int64_t count, int32_t dtype, int32_t op) {
  auto* communicator = static_cast<Communicator*>(handle);
  auto* task = new Shared(std::make_shared<Task>());
  (*task)->begin = [communicator, data, count, dtype, op] {
    return ccl::allreduce(data, data, static_cast<std::size_t>(count), static_cast<ccl::datatype>(kTypes[dtype]),
                          static_cast<ccl::reduction>(kOps[op]), *communicator->ranks);
  };
  driver().give(*task);
  return task;
}

STOKER_API int32_t stoker_oneccl_wait(void* request, double seconds) {
  const std::unique_ptr<Shared> task(static_cast<Shared*>(request));
  return driver().await(*task, seconds);
}

STOKER_API void stoker_oneccl_leave(void* handle, double seconds) {
  blocking(seconds, [handle] { delete static_cast<Communicator*>(handle); });
}
