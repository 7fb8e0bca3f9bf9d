// A lane runs the operations of one group in the order they were given, on its own thread or on the thread that waits for
// them, whichever comes first.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace {

using c10d::Work;
using Milliseconds = std::chrono::milliseconds;
template <typename T>
using Ref = c10::intrusive_ptr<T>;

class Lane;

class Job : public Work {
 public:
  Job(std::shared_ptr<Lane> lane, int rank, c10d::OpType kind, std::function<void()> run, std::vector<at::Tensor> results)
      : Work(rank, kind), lane_(std::move(lane)), run_(std::move(run)), results_(std::move(results)) {}

  bool wait(Milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  void abort() override { TORCH_CHECK(false, "an operation of ccl cannot be aborted alone; abort the group"); }

  Ref<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> hold(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (over_) settle();
    }
    return future_;
  }

  // `refusal`: why it is not to run any more.
  void perform(const char* refusal = nullptr) {
    std::exception_ptr failure;
    try {
      TORCH_CHECK(!refusal, refusal);
      run_();
    } catch (...) {
      failure = std::current_exception();
    }
    run_ = nullptr;  // lets go of the tensors
    failure_ = failure;
    finish(failure);
    const std::lock_guard<std::mutex> hold(future_mutex_);
    over_ = true;
    if (future_) settle();
  }

 private:
  void settle() {
    if (failure_)
      future_->setError(failure_);
    else
      future_->markCompleted(c10::IValue(results_));
  }
  const std::shared_ptr<Lane> lane_;  // someone may wait for a job whose group is gone
  std::function<void()> run_;
  std::vector<at::Tensor> results_;
  std::exception_ptr failure_;
  std::mutex future_mutex_;
  Ref<c10::ivalue::Future> future_;
  bool over_ = false;
};

class Lane {
 public:
  ~Lane() { close(); }

  // `waits`: the caller is going to wait at once, so the lane's own thread need not wake up for it.
  void submit(const Ref<Job>& job, bool waits) {
    std::unique_lock<std::mutex> hold(mutex_);
    TORCH_CHECK(!closed_, "this ccl group has been destroyed");
    if (mine()) {  // from a callback, which may wait for it: at once, for nothing else runs before the callback returns
      hold.unlock();
      return job->perform();
    }
    jobs_.push_back(job);
    if (waits) return;
    if (!thread_.joinable()) start();
    change_.notify_all();
  }

  // Leaves `job` to the lane's own thread, which nothing keeps from waiting longer; false if it is not over by then.
  bool watch(Job& job, Milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::unique_lock<std::mutex> hold(mutex_);
    if (mine()) return run_until(job, hold);
    if (!thread_.joinable() && !closed_) start();
    change_.notify_all();
    while (!job.isCompleted())
      if (change_.wait_until(hold, deadline) == std::cv_status::timeout) return job.isCompleted();
    return true;
  }

  // Runs what is before `job` and the job itself here, unless another thread is at it; then waits for that thread.
  bool help(Job& job) {
    std::unique_lock<std::mutex> hold(mutex_);
    return run_until(job, hold);
  }

  // Returns when no thread, the lane's own or one that helps, is at an operation, and none will begin another.
  void close() {
    std::unique_lock<std::mutex> hold(mutex_);
    closed_ = true;
    change_.notify_all();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
      std::thread ending = std::move(thread_);
      hold.unlock();
      ending.join();
      hold.lock();
    }
    change_.wait(hold, [this] { return idle() || mine(); });
    const std::deque<Ref<Job>> left = std::move(jobs_);
    jobs_.clear();
    hold.unlock();
    for (const auto& job : left) job->perform("this ccl group has been destroyed");
  }

  bool unfinished() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return !idle() || !jobs_.empty();
  }

 private:
  void start() {
    thread_ = std::thread([this] { serve(); });
  }

  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      change_.wait(hold, [this] { return idle() && (!jobs_.empty() || closed_); });
      if (jobs_.empty()) return;
      run_first(hold);
    }
  }

  bool run_until(Job& job, std::unique_lock<std::mutex>& hold) {
    while (!job.isCompleted()) {
      if (!jobs_.empty() && (idle() || mine()))
        run_first(hold);
      else
        change_.wait_for(hold, Milliseconds(100));
    }
    return true;
  }

  void run_first(std::unique_lock<std::mutex>& hold) {
    const Ref<Job> job = jobs_.front();
    jobs_.pop_front();
    const std::thread::id before = running_;  // this thread, where a callback waits for another operation
    running_ = std::this_thread::get_id();
    hold.unlock();
    job->perform();
    hold.lock();
    running_ = before;
    change_.notify_all();
  }

  bool idle() const { return running_ == std::thread::id(); }
  bool mine() const { return running_ == std::this_thread::get_id(); }

  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Ref<Job>> jobs_;
  std::thread thread_;
  std::thread::id running_;  // the thread that is at an operation, or at the callbacks of one
  bool closed_ = false;
};

bool Job::wait(Milliseconds timeout) {
  // The engine keeps its own time and names who is missing; a limit given here is of this wait alone, the operation goes on.
  const bool over = isCompleted() || (timeout.count() > 0 ? lane_->watch(*this, timeout) : lane_->help(*this));
  TORCH_CHECK(over, "ccl: rank ", rank_, " waited ", static_cast<double>(timeout.count()) / 1000, " s for an operation (",
              c10d::opTypeToString(retrieveOpType()), ") that is not over");
  const std::lock_guard<std::mutex> hold(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace
