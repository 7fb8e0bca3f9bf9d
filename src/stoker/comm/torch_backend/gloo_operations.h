// Collectives that gloo lacks, composed of those it has: means, gathers of uneven sizes, alltoall of lists.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <numeric>

#include "operation_queue.h"
#include "tensors.h"

namespace {

// An operation of gloo that has been started, and what to do with its result.
struct StartedWork {
  Ref<Work> work;
  std::function<void()> after;
};

template <typename Options>
bool averages(const Options& opts, const at::Tensor& tensor) {
  if (op_code(opts.reduceOp) != STOKER_AVG) return false;
  TORCH_CHECK(tensor.is_floating_point(), "avg of ", tensor.scalar_type(), " is not defined");
  return true;
}

template <typename Options>
Options with_sum(Options opts) {
  opts.reduceOp = c10d::ReduceOp::SUM;
  return opts;
}

bool same_sizes(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& t) { return t.sizes() == tensors[0].sizes(); });
}

void copy_to(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& flat) {
  for (size_t i = 0; i < outputs.size(); ++i)
    outputs[i].detach().copy_(flat[i].narrow(0, 0, outputs[i].numel()).view(outputs[i].sizes()));
}

// Every rank sends as many elements as the largest output has.
StartedWork gather_uneven(c10d::Backend& gloo, const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                    const c10d::AllgatherOptions& opts) {
  int64_t most = input.numel();
  for (const auto& output : outputs) most = std::max(most, output.numel());
  std::vector<at::Tensor> sent{at::zeros({most}, input.options())}, got;
  sent[0].narrow(0, 0, input.numel()).copy_(input.detach().reshape({-1}));
  for (size_t i = 0; i < outputs.size(); ++i) got.push_back(at::empty({most}, input.options()));
  std::vector<std::vector<at::Tensor>> into{got};
  return {gloo.allgather(into, sent, opts), [outputs, got] { copy_to(outputs, got); }};
}

StartedWork exchange_lists(c10d::Backend& gloo, const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                     const c10d::AllToAllOptions& opts) {
  std::vector<at::Tensor> parts;
  std::vector<int64_t> sent, received;
  for (const auto& input : inputs) parts.push_back(input.detach().reshape({-1})), sent.push_back(input.numel());
  for (const auto& output : outputs) received.push_back(output.numel());
  at::Tensor from = at::cat(parts);
  at::Tensor to = at::empty({std::accumulate(received.begin(), received.end(), int64_t{0})}, from.options());
  auto lengths = received;  // gloo moves from the vectors it is given
  return {gloo.alltoall_base(to, from, lengths, sent, opts),
          [outputs, to, received] { copy_to(outputs, to.split_with_sizes(received)); }};
}

}  // namespace
