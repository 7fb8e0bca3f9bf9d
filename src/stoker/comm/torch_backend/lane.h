// A lane runs the operations of one group in the order they were given, on its own thread or on the thread that waits for
// them, whichever comes first.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
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
  Job(Lane& lane, int rank, c10d::OpType kind, std::function<void()> run, std::vector<at::Tensor> results)
      : Work(rank, kind), lane_(lane), run_(std::move(run)), results_(std::move(results)) {}

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
  Lane& lane_;
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
    const std::lock_guard<std::mutex> hold(mutex_);
    TORCH_CHECK(!closed_, "this ccl group has been destroyed");
    jobs_.push_back(job);
    if (waits) return;
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    change_.notify_all();
  }

  // Leaves `job` to the lane's own thread, which nothing keeps from waiting longer; false if it is not over by then.
  bool watch(Job& job, Milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::unique_lock<std::mutex> hold(mutex_);
    if (!thread_.joinable() && !closed_) thread_ = std::thread([this] { serve(); });
    change_.notify_all();
    while (!job.isCompleted())
      if (change_.wait_until(hold, deadline) == std::cv_status::timeout) return job.isCompleted();
    return true;
  }

  // Runs what is before `job` and the job itself here, unless another thread is at it; then waits for that thread.
  bool help(Job& job) {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!job.isCompleted()) {
      if (busy_ || jobs_.empty())
        change_.wait_for(hold, Milliseconds(100));
      else
        run_first(hold);
    }
    return true;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closed_ = true;
      change_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    for (; !jobs_.empty(); jobs_.pop_front()) jobs_.front()->perform("this ccl group has been destroyed");
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      change_.wait(hold, [this] { return !busy_ && (!jobs_.empty() || closed_); });
      if (jobs_.empty()) return;
      run_first(hold);
    }
  }

  void run_first(std::unique_lock<std::mutex>& hold) {
    const Ref<Job> job = jobs_.front();
    jobs_.pop_front();
    busy_ = true;
    hold.unlock();
    job->perform();
    hold.lock();
    busy_ = false;
    change_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Ref<Job>> jobs_;
  std::thread thread_;
  bool busy_ = false, closed_ = false;
};

bool Job::wait(Milliseconds timeout) {
  // The engine keeps its own time and names who is missing; a limit given here is of this wait alone, the operation goes on.
  const bool over = isCompleted() || (timeout.count() > 0 ? lane_.watch(*this, timeout) : lane_.help(*this));
  TORCH_CHECK(over, "ccl: rank ", rank_, " waited ", static_cast<double>(timeout.count()) / 1000, " s for an operation (",
              c10d::opTypeToString(retrieveOpType()), ") that is not over");
  const std::lock_guard<std::mutex> hold(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace
