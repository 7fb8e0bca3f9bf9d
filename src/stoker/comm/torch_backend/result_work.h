// What every operation of the backend has in common: results, a future of them, and a name in profiles.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <mutex>

namespace {

using c10d::Work;
using Milliseconds = std::chrono::milliseconds;
template <typename T>
using Ref = c10::intrusive_ptr<T>;

// As torch's other backends name their operations in profiles.
const char* profiling_title(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::ALLREDUCE: return "ccl:all_reduce";
    case c10d::OpType::_ALLREDUCE_SPARSE: return "ccl:sparse_all_reduce";
    case c10d::OpType::BROADCAST: return "ccl:broadcast";
    case c10d::OpType::REDUCE: return "ccl:reduce";
    case c10d::OpType::ALLGATHER: return "ccl:all_gather";
    case c10d::OpType::REDUCE_SCATTER: return "ccl:reduce_scatter";
    case c10d::OpType::ALLTOALL: return "ccl:all_to_all";
    case c10d::OpType::GATHER: return "ccl:gather";
    case c10d::OpType::SCATTER: return "ccl:scatter";
    case c10d::OpType::BARRIER: return "ccl:barrier";
    case c10d::OpType::SEND: return "ccl:send";
    case c10d::OpType::RECV: return "ccl:recv";
    case c10d::OpType::RECVANYSOURCE: return "ccl:recvAnySource";
    default: return "ccl:unknown";
  }
}

class ResultWork : public Work {
 public:
  // `inputs`: the tensors whose shapes profiles show; `lists`: how many lists of equal length the future has them in.
  ResultWork(int rank, c10d::OpType type, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results, size_t lists = 1)
      : Work(rank, type, profiling_title(type), inputs), results_(std::move(results)), lists_(lists) {}

  std::vector<at::Tensor> result() override { return results_; }
  void abort() override { TORCH_CHECK(false, "a single ccl operation cannot be aborted; abort the group"); }

  Ref<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
      if (lists_ > 1) type = c10::ListType::create(type);
      future_ = c10::make_intrusive<c10::ivalue::Future>(type);
      if (done_) complete_future();
    }
    return future_;
  }

 protected:
  // Once, when the operation has ended. Callbacks of the future run here, without the lock: they may ask for the future again.
  void complete(std::exception_ptr failure) {
    failure_ = failure;
    finish(failure);
    std::unique_lock<std::mutex> lock(future_mutex_);
    done_ = true;
    const bool requested = static_cast<bool>(future_);
    lock.unlock();
    if (requested) complete_future();
  }

  // How wait() ends: with the operation's own error, or with a timeout if it is not done.
  bool result_of_wait(bool done, Milliseconds timeout) {
    TORCH_CHECK(done, "ccl: timeout while rank ", rank_, " waited ", static_cast<double>(timeout.count()) / 1000,
                " s for an operation (", c10d::opTypeToString(retrieveOpType()), ") that is not done yet");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

 private:
  void complete_future() {
    if (failure_)
      future_->setError(failure_);
    else
      future_->markCompleted(lists_ > 1 ? c10::IValue(divided()) : c10::IValue(results_));
  }

  std::vector<std::vector<at::Tensor>> divided() const {
    std::vector<std::vector<at::Tensor>> all;
    const auto each = static_cast<std::ptrdiff_t>(results_.size() / lists_);
    for (auto at = results_.begin(); at != results_.end(); at += each) all.emplace_back(at, at + each);
    return all;
  }

  std::vector<at::Tensor> results_;
  const size_t lists_;
  std::exception_ptr failure_;
  std::mutex future_mutex_;
  Ref<c10::ivalue::Future> future_;
  bool done_ = false;
};

}  // namespace
