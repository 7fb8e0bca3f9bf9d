// Tensors as the functions of stoker.h take them: addresses, sizes, and codes of types and reductions.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/extension.h>

#include <vector>

#include "stoker.h"

namespace {

int type_code(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return STOKER_FLOAT32;
    case at::kDouble: return STOKER_FLOAT64;
    case at::kBFloat16: return STOKER_BFLOAT16;
    case at::kHalf: return STOKER_FLOAT16;
    case at::kChar: return STOKER_INT8;
    case at::kByte: return STOKER_UINT8;
    case at::kShort: return STOKER_INT16;
    case at::kInt: return STOKER_INT32;
    case at::kLong: return STOKER_INT64;
    case at::kBool: return STOKER_BOOL;
    default: TORCH_CHECK(false, "ccl cannot reduce ", tensor.scalar_type(), "; it reduces float32, float64, bfloat16, float16, "
                         "int8, uint8, int16, int32, int64 and bool");
  }
}

struct Reduction {
  c10d::ReduceOp::RedOpType torch;
  int stoker;
};
constexpr Reduction kReductions[] = {
    {c10d::ReduceOp::SUM, STOKER_SUM}, {c10d::ReduceOp::AVG, STOKER_AVG},   {c10d::ReduceOp::PRODUCT, STOKER_PRODUCT},
    {c10d::ReduceOp::MIN, STOKER_MIN}, {c10d::ReduceOp::MAX, STOKER_MAX},   {c10d::ReduceOp::BAND, STOKER_BAND},
    {c10d::ReduceOp::BOR, STOKER_BOR}, {c10d::ReduceOp::BXOR, STOKER_BXOR},
};

int op_code(const c10d::ReduceOp& op) {
  for (const auto& known : kReductions)
    if (op == known.torch) return known.stoker;
  TORCH_CHECK(false, "ccl supports the reductions SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR only");
}

c10d::ReduceOp::RedOpType torch_op(int code) {
  for (const auto& known : kReductions)
    if (code == known.stoker) return known.torch;
  TORCH_CHECK(false, "reduction ", code, " does not exist");
}

// A tensor as contiguous memory: the tensor itself, or a contiguous copy, which copy_back() writes to the tensor.
struct Dense {
  explicit Dense(const at::Tensor& tensor) : tensor(tensor), dense(tensor.contiguous().resolve_conj().resolve_neg()) {}
  void* data() const { return dense.data_ptr(); }
  int64_t bytes() const { return static_cast<int64_t>(dense.nbytes()); }
  void copy_back() const {
    if (!dense.is_same(tensor)) write(tensor, dense);
  }
  static void write(const at::Tensor& to, const at::Tensor& from) {
    const at::NoGradGuard no_gradient;
    const c10::InferenceMode mode(to.is_inference());
    to.copy_(from);  // not to.detach(): a sparse tensor would keep its old indices
  }
  at::Tensor tensor, dense;
};

// Complex numbers as pairs of real ones, which have the same sum and mean; other tensors as they are.
at::Tensor real_numbers(const at::Tensor& dense, int op) {
  return dense.is_complex() && (op == STOKER_SUM || op == STOKER_AVG) ? at::view_as_real(dense) : dense;
}

std::vector<Dense> dense(const std::vector<at::Tensor>& tensors) {
  std::vector<Dense> all;
  for (const auto& tensor : tensors) all.emplace_back(tensor);
  return all;
}

std::vector<void*> addresses(const std::vector<Dense>& items) {
  std::vector<void*> all;
  for (const auto& item : items) all.push_back(item.data());
  return all;
}

std::vector<int64_t> sizes_in_bytes(const std::vector<Dense>& items) {
  std::vector<int64_t> all;
  for (const auto& item : items) all.push_back(item.bytes());
  return all;
}

// The reduction of several tensors of one rank, as a new tensor; a mean is left as the sum.
at::Tensor combined(const std::vector<at::Tensor>& tensors, int op) {
  at::Tensor total = tensors[0].clone();
  for (size_t i = 1; i < tensors.size(); ++i) {
    const at::Tensor& next = tensors[i];
    switch (op) {
      case STOKER_SUM:
      case STOKER_AVG: total.add_(next); break;
      case STOKER_PRODUCT: total.mul_(next); break;
      case STOKER_MIN: total = at::minimum(total, next); break;
      case STOKER_MAX: total = at::maximum(total, next); break;
      case STOKER_BAND: total.bitwise_and_(next); break;
      case STOKER_BOR: total.bitwise_or_(next); break;
      case STOKER_BXOR: total.bitwise_xor_(next); break;
    }
  }
  return total;
}

std::vector<at::Tensor> parts(const at::Tensor& tensor, int count) {
  const auto flat = tensor.view({-1});
  TORCH_CHECK(flat.numel() % count == 0, "a tensor of ", flat.numel(), " elements cannot be divided among ", count,
                    " ranks");
  const int64_t each = flat.numel() / count;
  std::vector<at::Tensor> all;
  for (int i = 0; i < count; ++i) all.push_back(flat.narrow(0, i * each, each));
  return all;
}

}  // namespace
