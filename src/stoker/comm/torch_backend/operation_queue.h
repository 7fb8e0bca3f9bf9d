// Runs the operations of one group in the order in which they were submitted: on the queue's own thread, or on a thread that
// waits for them, whichever is free first.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "communication_cpus.h"
#include "result_work.h"

namespace {

class OperationQueue;

class Operation : public ResultWork {
 public:
  Operation(std::shared_ptr<OperationQueue> queue, int rank, c10d::OpType type, std::function<void()> body,
            const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results, size_t lists = 1)
      : ResultWork(rank, type, inputs, std::move(results), lists), queue_(std::move(queue)), body_(std::move(body)) {}

  bool wait(Milliseconds timeout) override;

  // `refusal`: why the operation fails without being run.
  void run(const char* refusal = nullptr) {
    std::exception_ptr failure;
    try {
      TORCH_CHECK(!refusal, refusal);
      body_();
    } catch (...) {
      failure = std::current_exception();
    }
    body_ = nullptr;  // releases the tensors
    complete(failure);
  }

 private:
  const std::shared_ptr<OperationQueue> queue_;  // an operation may be waited for after its group is destroyed
  std::function<void()> body_;
};

class OperationQueue {
 public:
  ~OperationQueue() { close(); }

  // `caller_waits`: the caller waits at once and runs the operation itself, so the queue's own thread need not wake up.
  void submit(const Ref<Operation>& operation, bool caller_waits) {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!closed_, "this ccl group has been destroyed");
    if (runs_here()) {  // from a callback, which may wait for it: at once, because nothing else runs before the callback returns
      lock.unlock();
      return operation->run();
    }
    operations_.push_back(operation);
    if (caller_waits) return;
    if (!thread_.joinable()) start_thread();
    change_.notify_all();
  }

  // Leaves `operation` to the queue's own thread; false if it is not done within `timeout`.
  bool wait_for(Operation& operation, Milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::unique_lock<std::mutex> lock(mutex_);
    if (runs_here()) return run_until_done(operation, lock);
    if (!thread_.joinable() && !closed_) start_thread();
    change_.notify_all();
    while (!operation.isCompleted())
      if (change_.wait_until(lock, deadline) == std::cv_status::timeout) return operation.isCompleted();
    return true;
  }

  // Runs all operations up to and including this one on the calling thread, unless another thread runs them already.
  bool wait(Operation& operation) {
    std::unique_lock<std::mutex> lock(mutex_);
    return run_until_done(operation, lock);
  }

  // Returns when no thread runs an operation and none will start another.
  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    change_.notify_all();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
      std::thread ending = std::move(thread_);
      lock.unlock();
      ending.join();
      lock.lock();
    }
    change_.wait(lock, [this] { return idle() || runs_here(); });
    const std::deque<Ref<Operation>> left = std::move(operations_);
    operations_.clear();
    lock.unlock();
    for (const auto& operation : left) operation->run("this ccl group has been destroyed");
  }

  bool has_unfinished() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !idle() || !operations_.empty();
  }

 private:
  void start_thread() {
    thread_ = std::thread([this] { run_all(); });
  }

  void run_all() {
    move_to_communication_cpus();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      change_.wait(lock, [this] { return idle() && (!operations_.empty() || closed_); });
      if (operations_.empty()) return;
      run_first(lock);
    }
  }

  bool run_until_done(Operation& operation, std::unique_lock<std::mutex>& lock) {
    while (!operation.isCompleted()) {
      if (!operations_.empty() && (idle() || runs_here()))
        run_first(lock);
      else
        change_.wait_for(lock, Milliseconds(100));
    }
    return true;
  }

  void run_first(std::unique_lock<std::mutex>& lock) {
    const Ref<Operation> operation = operations_.front();
    operations_.pop_front();
    const std::thread::id before = running_;  // this thread, if a callback waits for another operation
    running_ = std::this_thread::get_id();
    lock.unlock();
    operation->run();
    lock.lock();
    running_ = before;
    change_.notify_all();
  }

  bool idle() const { return running_ == std::thread::id(); }
  bool runs_here() const { return running_ == std::this_thread::get_id(); }

  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Ref<Operation>> operations_;
  std::thread thread_;
  std::thread::id running_;  // the thread that runs an operation or its callbacks
  bool closed_ = false;
};

bool Operation::wait(Milliseconds timeout) {
  // The group's own timeout names the missing ranks. A timeout given here ends this wait only; the operation continues.
  const bool done = isCompleted() || (timeout.count() > 0 ? queue_->wait_for(*this, timeout) : queue_->wait(*this));
  return result_of_wait(done, timeout);
}

}  // namespace
