// The connection of a host's leader with the leaders of the other hosts: allreduce by oneCCL or gloo, whichever measured faster.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "oneccl.h"
#include "operation_queue.h"
#include "tensors.h"

namespace {

// The functions of oneccl.h in the library that Python has loaded: the backend itself is linked to torch alone.
struct OneCCL {
  void* library;
#define STOKER_FUNCTION(name) \
  decltype(&stoker_oneccl_##name) name = reinterpret_cast<decltype(name)>(library ? dlsym(library, "stoker_oneccl_" #name) : nullptr)
  STOKER_FUNCTION(error);
  STOKER_FUNCTION(reduces);
  STOKER_FUNCTION(allreduce);
  STOKER_FUNCTION(wait);
  STOKER_FUNCTION(leave);
#undef STOKER_FUNCTION
};

class LeaderLink {
 public:
  // `gloo` is null on ranks that do not lead a host. `communicator` is oneCCL's, or null. `carries`: whether oneCCL is faster than
  // gloo for small messages, large ones, small ones of 16 bits, and large ones of 16 bits.
  LeaderLink(Ref<c10d::Backend> gloo, void* oneccl_library, void* communicator, std::vector<bool> carries)
      : gloo_(std::move(gloo)), oneccl_{oneccl_library}, communicator_(communicator), carries_(std::move(carries)) {}

  bool leads() const { return static_cast<bool>(gloo_); }

  // An allreduce that has been started: by oneCCL (request) or by gloo (work).
  struct Pending {
    at::Tensor piece;
    Ref<Work> work;
    void* request = nullptr;
  };

  Pending start_allreduce(const at::Tensor& piece, int op, double timeout) {
    Pending pending{piece, {}, nullptr};
    // Booleans are sent as bytes: any() is their maximum, all() their minimum.
    const bool is_bool = piece.scalar_type() == at::kBool;
    const at::Tensor sent = is_bool ? piece.view(at::kByte) : piece;
    if (is_bool && op != STOKER_BXOR)
      op = op == STOKER_PRODUCT || op == STOKER_MIN || op == STOKER_BAND ? STOKER_MIN : STOKER_MAX;
    const int type = type_code(sent);
    const bool half = type == STOKER_BFLOAT16 || type == STOKER_FLOAT16;
    if (communicator_ && carries_[2 * half + (sent.nbytes() > kSmall)] && oneccl_.reduces(type, op)) {
      pending.request = oneccl_.allreduce(communicator_, sent.data_ptr(), sent.numel(), type, op);
      return pending;
    }
    std::vector<at::Tensor> tensors{sent};
    c10d::AllreduceOptions options;
    options.reduceOp = torch_op(op);
    options.timeout = Milliseconds(static_cast<int64_t>(timeout * 1000));
    pending.work = gloo_->allreduce(tensors, options);
    return pending;
  }

  void wait(const Pending& pending, double timeout) {
    if (!pending.request) {
      pending.work->wait();
    } else if (oneccl_.wait(pending.request, timeout)) {
      abandon();
      throw std::runtime_error(oneccl_.error());
    }
  }

  // In good order, together with the other leaders.
  void close() {
    if (communicator_) oneccl_.leave(communicator_, kLongestLeave);
    communicator_ = nullptr;
  }

  // After a failure: leaving in good order would wait for the other hosts.
  void abandon() { communicator_ = nullptr; }

 private:
  static constexpr size_t kSmall = 64 << 10;  // bytes
  static constexpr double kLongestLeave = 10;  // seconds

  Ref<c10d::Backend> gloo_;
  const OneCCL oneccl_;
  void* communicator_;
  std::vector<bool> carries_;
};

}  // namespace
