// What the collectives refuse. stoker.h takes addresses without shapes: tensors that do not fit together are refused here, before
// anything is overwritten. The key words ("invalid root rank", "invalid tensor size") are those of gloo, which scripts look for.
#pragma once

#include <torch/extension.h>

#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;

void expect_root(const char* operation, int64_t root, int ranks) {
  TORCH_CHECK(root >= 0 && root < ranks, operation, ": invalid root rank ", root, " in a group of ", ranks, " ranks");
}

void expect_root_tensor(const char* operation, int64_t root, const Tensors& tensors) {
  TORCH_CHECK(root >= 0 && root < static_cast<int64_t>(tensors.size()), operation, ": invalid root tensor ", root, " of ",
              tensors.size());
}

void expect_type(const char* operation, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.scalar_type() == other.scalar_type(), operation, ": invalid tensor type: tensors of ", one.scalar_type(),
              " and of ", other.scalar_type(), "; tensors must all have the same type");
}

void expect_layout(const char* operation, const Tensors& tensors) {
  for (size_t i = 1; i < tensors.size(); ++i)
    TORCH_CHECK(tensors[i].layout() == tensors[0].layout(), operation, ": invalid tensor layout at index ", i, ": ",
                tensors[i].layout(), " beside ", tensors[0].layout());
}

void expect_dense(const char* operation, const Tensors& tensors) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided, operation, ": unsupported layout or device: ",
                tensor.layout(), " on ", tensor.device(), "; ccl takes dense CPU tensors here");
}

// Several tensors of one rank that count as contributions to the same result.
void expect_alike(const char* operation, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), operation, ": requires non-empty tensor list");
  expect_layout(operation, tensors);
  for (const auto& tensor : tensors) {
    expect_type(operation, tensors[0], tensor);
    TORCH_CHECK(tensor.sizes() == tensors[0].sizes(), operation, ": invalid tensor size: ", tensor.sizes(), " beside ",
                tensors[0].sizes());
  }
}

// What one rank receives: an output like each of the inputs.
void expect_outputs(const char* operation, const Tensors& inputs, const Tensors& outputs) {
  TORCH_CHECK(inputs.size() == outputs.size(), operation, ": invalid output: ", inputs.size(), " inputs, and ", outputs.size(),
              " outputs for a rank");
  expect_dense(operation, inputs);
  expect_dense(operation, outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(outputs[i].scalar_type() == inputs[i].scalar_type(), operation, ": invalid tensor type at index ", i, ": ",
                outputs[i].scalar_type(), " for an input of ", inputs[i].scalar_type());
    TORCH_CHECK(outputs[i].numel() == inputs[i].numel(), operation, ": invalid size of output tensor at index ", i, ": ",
                outputs[i].sizes(), " for an input of ", inputs[i].sizes());
  }
}

// `what`: "input" or "output".
const at::Tensor& expect_single(const char* operation, const char* what, const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, operation, ": requires a single-element ", what, " tensor list, not ", tensors.size(),
              " tensors");
  return tensors[0];
}

const Tensors& expect_single(const char* operation, const char* what, const std::vector<Tensors>& lists) {
  TORCH_CHECK(lists.size() == 1, operation, ": requires a single-element ", what, " list, not ", lists.size(), " lists");
  return lists[0];
}

// One tensor for each rank.
void expect_list(const char* operation, const char* what, const Tensors& list, int ranks) {
  TORCH_CHECK(static_cast<int>(list.size()) == ranks, operation, ": invalid ", what, " tensor list: Incorrect ", what, " list size ",
              list.size(), ". ", what[0] == 'i' ? "Input" : "Output", " list size should be ", ranks, ", one tensor for each rank");
}

// `gathered`: how many inputs make one output; `scattered`: how many outputs one input is divided into.
void expect_fit(const char* operation, const at::Tensor& input, const at::Tensor& output, int gathered = 1, int scattered = 1) {
  expect_type(operation, input, output);
  const int ranks = std::max(gathered, scattered);
  TORCH_CHECK(input.numel() * gathered == output.numel() * scattered, operation, ": invalid tensor size: an input of ",
              input.numel(), " elements does not fit an output of ", output.numel(),
              ranks > 1 ? " in a group of " + std::to_string(ranks) : "");
}

}  // namespace
