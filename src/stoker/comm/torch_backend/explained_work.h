// An operation of gloo between hosts whose error names the missing ranks.
#pragma once

#include "operation_queue.h"

namespace {

using Explain = std::function<std::string(std::string)>;  // an error message -> the same with the missing ranks added

class ExplainedWork : public Work {
 public:
  ExplainedWork(Ref<Work> inner, Explain explain)
      : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), explain_(std::move(explain)) {}

  bool wait(Milliseconds timeout) override {
    std::string problem;
    try {
      return inner_->wait(timeout);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const pybind11::gil_scoped_acquire gil;
    C10_THROW_ERROR(DistBackendError, explain_("ccl: " + problem));
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  Ref<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }

 private:
  Ref<Work> inner_;
  const Explain explain_;  // a copy, because an operation may outlive its group
};

}  // namespace
