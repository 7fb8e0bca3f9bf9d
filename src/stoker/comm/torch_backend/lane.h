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

  void perform() {
    std::exception_ptr failure;
    try {
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

  // Runs what is before `job` and the job itself here, unless another thread is at it; then waits for that thread.
  void help(Job& job) {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!job.isCompleted()) {
      if (busy_ || jobs_.empty())
        change_.wait_for(hold, Milliseconds(100));
      else
        run_first(hold);
    }
  }

  void close() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closed_ = true;
      change_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
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

bool Job::wait(Milliseconds) {
  // The engine keeps its own time and names who is missing, which a timeout here could not.
  lane_.help(*this);
  const std::lock_guard<std::mutex> hold(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace
