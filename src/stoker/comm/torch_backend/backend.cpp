// The backend "ccl" as a c10d::Backend, compiled against the torch it runs with (see ../compiled.py).
//
// Within a host, tensors become addresses (tensors.h) for the shared-memory collectives of stoker.h, in the order of the group's
// queue (operation_queue.h); messages between two ranks are matched by messages.h. Between hosts, allreduce also goes through one leader per host (leader_link.h); everything else is
// left to gloo (gloo_operations.h).
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "arguments.h"
#include "explained_work.h"
#include "gloo_operations.h"
#include "leader_link.h"
#include "messages.h"
#include "operation_queue.h"
#include "stoker.h"
#include "tensors.h"

namespace {

using c10d::OpType;

void check(void* group, int code) {
  if (code) C10_THROW_ERROR(DistBackendError, std::string("ccl: ") + stoker_comm_error(group));
}

// For joining threads, which may need the interpreter to finish what they are running.
struct WithoutGil {
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

class Backend : public c10d::Backend {
 public:
  Backend(int rank, int size, uintptr_t shared_memory, std::vector<int> local_ranks, std::vector<int> local_names, int hosts,
          LeaderLink leader_link, Ref<c10d::Backend> flat, std::string other_hosts, double timeout, Explain explain)
      : c10d::Backend(rank, size), memory_(reinterpret_cast<void*>(shared_memory)), local_ranks_(std::move(local_ranks)),
        hosts_(hosts), leader_link_(std::move(leader_link)), flat_(std::move(flat)), other_hosts_(std::move(other_hosts)),
        timeout_(timeout), explain_(std::move(explain)) {
    if (memory_) messages_ = std::make_unique<Messages>(memory_, local_index(rank), std::move(local_names));
  }

  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "ccl"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = std::chrono::duration<double>(timeout).count(); }

  // How many collectives this rank has called. It starts at 0 on all ranks, so they need not agree on a beginning.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void shutdown() override {
    const WithoutGil released;
    closed_ = true;
    if (getpid() != process_) return leak_in_forked_child();
    const std::lock_guard<std::mutex> only_one(shutdown_mutex_);
    // Messages that were sent are delivered; nobody is left for those still to be received.
    if (messages_) messages_->close("rank " + std::to_string(getRank()) + " destroyed the group", false);
    queue_->close();
    gloo_queue_->close();
    {
      const std::lock_guard<std::mutex> lock(memory_mutex_);
      if (memory_) stoker_comm_destroy(memory_);
      memory_ = nullptr;
    }
    leader_link_.close();
  }

  void abort() override {
    const std::string why = "rank " + std::to_string(getRank()) + " aborted the group";
    const WithoutGil released;
    closed_ = true;
    if (getpid() == process_) {
      leader_link_.abandon();
      if (messages_) messages_->close(why, true);
      const std::lock_guard<std::mutex> lock(memory_mutex_);
      if (memory_) stoker_comm_abort(memory_, why.c_str());
    }
    shutdown();  // gloo cannot be aborted: its operations end with their own timeout
  }

  Ref<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    check_open();
    expect_alike("all_reduce", tensors);
    if (tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
    expect_dense("all_reduce", tensors);
    if (!shares_memory_) return counted(flat_->allreduce(tensors, opts));
    const int op = expect_reducible(opts, tensors[0]);
    return start(OpType::ALLREDUCE, opts, tensors, [this, tensors, op] {
      if (tensors.size() == 1) return allreduce_one(tensors[0], op);
      const at::Tensor total = combined(tensors, op);
      allreduce_one(total, op);
      if (op == STOKER_AVG) total.div_(static_cast<int64_t>(tensors.size()));
      for (const auto& tensor : tensors) Dense::write(tensor, total);
    });
  }

  Ref<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    check_open();
    TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced: requires non-empty tensor list");
    expect_layout("all_reduce_coalesced", tensors);
    expect_dense("all_reduce_coalesced", tensors);
    for (const auto& tensor : tensors) expect_type("all_reduce_coalesced", tensors[0], tensor);
    if (!shares_memory_) return counted(flat_->allreduce_coalesced(tensors, opts));
    const int op = expect_reducible(opts, tensors[0]);
    return start(OpType::ALLREDUCE, opts, tensors, [this, tensors, op] {
      Tensors reduced;
      for (const auto& tensor : tensors) reduced.push_back(shares_storage(reduced, tensor) ? tensor.clone() : tensor);
      for (const auto& tensor : reduced) allreduce_one(tensor, op);
      for (size_t i = 0; i < tensors.size(); ++i)
        if (!reduced[i].is_same(tensors[i])) Dense::write(tensors[i], reduced[i]);
    });
  }

  Ref<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    check_open();
    expect_root("broadcast", opts.rootRank, getSize());
    expect_root_tensor("broadcast", opts.rootTensor, tensors);
    expect_alike("broadcast", tensors);
    expect_dense("broadcast", tensors);
    if (!one_host()) return counted(flat_->broadcast(tensors, opts));
    const int root = static_cast<int>(opts.rootRank);
    return start(OpType::BROADCAST, opts, tensors, [this, tensors, root, which = opts.rootTensor] {
      const Dense item(tensors[which]);
      check(memory_, stoker_comm_broadcast(memory_, item.data(), item.bytes(), root));
      item.copy_back();
      for (const auto& tensor : tensors)
        if (!tensor.is_same(item.tensor)) Dense::write(tensor, item.tensor);
    });
  }

  Ref<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    check_open();
    expect_root("reduce", opts.rootRank, getSize());
    expect_root_tensor("reduce", opts.rootTensor, tensors);
    TORCH_CHECK(tensors.size() == 1, "reduce: requires a single-element tensor list, not ", tensors.size(), " tensors");
    const at::Tensor tensor = tensors[0];
    expect_dense("reduce", tensors);
    if (!one_host() && averages(opts, tensor))
      return then(OpType::REDUCE, opts, mean(flat_->reduce(tensors, with_sum(opts)), tensor), tensors);
    if (!one_host()) return counted(flat_->reduce(tensors, opts));
    const int op = expect_reducible(opts, tensor), root = static_cast<int>(opts.rootRank);
    return start(OpType::REDUCE, opts, tensors, [this, tensor, op, root] {
      const Dense item(tensor);
      reduce_on_host(item.dense, op, root);
      item.copy_back();
    });
  }

  Ref<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    check_open();
    TORCH_CHECK(!inputs.empty(), "all_gather: requires non-empty input tensor list");
    TORCH_CHECK(outputs.size() == inputs.size(), "all_gather: requires input/output tensor lists to have the same length, not ",
                inputs.size(), " inputs and ", outputs.size(), " lists of outputs");
    if (inputs.size() > 1) return gather_several(outputs, inputs, opts);
    expect_list("all_gather", "output", outputs[0], getSize());
    if (!one_host() && !same_sizes(outputs[0]))
      return then(OpType::ALLGATHER, opts, gather_uneven(*flat_, outputs[0], inputs[0], opts), outputs[0]);
    if (!one_host()) return counted(flat_->allgather(outputs, inputs, opts));
    return gather_all(outputs[0], inputs[0], opts);
  }

  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    if (!one_host()) return counted(flat_->_allgather_base(output, input, opts));
    expect_fit("all_gather_into_tensor", input, output, getSize(), 1);
    return gather_all(parts(output, getSize()), input, opts);
  }

  Ref<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(!inputs.empty(), "all_gather_coalesced: requires non-empty input tensor list");
    TORCH_CHECK(static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced: invalid output: ", outputs.size(),
                " lists for a group of ", getSize(), " ranks; output lists should be equal to world size");
    std::vector<Tensors> by_input(inputs.size());
    for (const auto& list : outputs) {
      expect_outputs("all_gather_coalesced", inputs, list);
      for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(list[i]);
    }
    if (!one_host()) {
      Ref<Work> last;  // operations run in order: when the last is done, all are
      for (size_t i = 0; i < inputs.size(); ++i) {
        std::vector<Tensors> list{by_input[i]};
        Tensors input{inputs[i]};
        last = allgather(list, input, opts);
      }
      return last;
    }
    Tensors results;
    for (const auto& list : outputs) results.insert(results.end(), list.begin(), list.end());
    return start(OpType::ALLGATHER, opts, inputs, results, [this, by_input, inputs] {
      for (size_t i = 0; i < inputs.size(); ++i) gather_on_host(by_input[i], inputs[i]);
    });
  }

  Ref<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(), "all_gather_into_tensor_coalesced: ", inputs.size(),
                " inputs and ", outputs.size(), " outputs; pass one output for each input, and at least one");
    Ref<Work> last;  // operations run in order: when the last is done, all are
    for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    check_open();
    const at::Tensor output = expect_single("reduce_scatter", "output", outputs);
    const Tensors list = expect_single("reduce_scatter", "input", inputs);
    expect_list("reduce_scatter", "input", list, getSize());
    if (!one_host() && averages(opts, output))
      return then(OpType::REDUCE_SCATTER, opts, mean(flat_->reduce_scatter(outputs, inputs, with_sum(opts)), output), outputs);
    if (!one_host()) return counted(flat_->reduce_scatter(outputs, inputs, opts));
    return scatter_reduced(output, list, opts);
  }

  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    if (!one_host() && averages(opts, output))
      return then(OpType::REDUCE_SCATTER, opts, mean(flat_->_reduce_scatter_base(output, input, with_sum(opts)), output), {output});
    if (!one_host()) return counted(flat_->_reduce_scatter_base(output, input, opts));
    expect_fit("reduce_scatter_tensor", input, output, 1, getSize());
    return scatter_reduced(output, parts(input, getSize()), opts);
  }

  Ref<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(), "reduce_scatter_tensor_coalesced: ", inputs.size(),
                " inputs and ", outputs.size(), " outputs; pass one output for each input, and at least one");
    Ref<Work> last;
    for (size_t i = 0; i < outputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    expect_list("all_to_all", "input", inputs, getSize());
    expect_list("all_to_all", "output", outputs, getSize());
    expect_dense("all_to_all", inputs);
    expect_dense("all_to_all", outputs);
    for (const auto& tensor : inputs) expect_type("all_to_all", inputs[0], tensor);
    for (const auto& tensor : outputs) expect_type("all_to_all", inputs[0], tensor);
    expect_fit("all_to_all, to itself", inputs[getRank()], outputs[getRank()]);
    if (!one_host()) return then(OpType::ALLTOALL, opts, exchange_lists(*flat_, outputs, inputs, opts), outputs);
    return start(OpType::ALLTOALL, opts, inputs, outputs, [this, inputs, outputs] {
      const auto sources = dense(inputs), targets = dense(outputs);
      const auto from = addresses(sources), to = addresses(targets);
      const auto sent = sizes_in_bytes(sources), received = sizes_in_bytes(targets);
      check(memory_, stoker_comm_alltoall(memory_, from.data(), sent.data(), to.data(), received.data()));
      for (const auto& target : targets) target.copy_back();
    });
  }

  Ref<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    if (!one_host()) return counted(flat_->alltoall_base(output, input, output_splits, input_splits, opts));
    auto outputs = split(output, output_splits), inputs = split(input, input_splits);
    return alltoall(outputs, inputs, opts);
  }

  Ref<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    const auto [own, list, root] = rooted("gather", {"input", inputs}, {"output", outputs}, opts.rootRank);
    for (const auto& output : list) expect_fit("gather", own, output);
    if (!one_host()) return counted(flat_->gather(outputs, inputs, opts));
    return start(OpType::GATHER, opts, inputs, list, [this, own = own, list = list, root = root] {
      const Dense source(own);
      const auto targets = dense(list);
      const auto to = addresses(targets);
      check(memory_, stoker_comm_gather(memory_, source.data(), to.data(), source.bytes(), root));
      for (const auto& target : targets) target.copy_back();
    });
  }

  Ref<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    const auto [own, list, root] = rooted("scatter", {"output", outputs}, {"input", inputs}, opts.rootRank);
    for (const auto& input : list) expect_fit("scatter", input, own);
    if (!one_host()) return counted(flat_->scatter(outputs, inputs, opts));
    return start(OpType::SCATTER, opts, list, outputs, [this, own = own, list = list, root = root] {
      const auto sources = dense(list);
      const auto from = addresses(sources);
      const Dense target(own);
      check(memory_, stoker_comm_scatter(memory_, from.data(), target.data(), target.bytes(), root));
      target.copy_back();
    });
  }

  Ref<Work> barrier(const c10d::BarrierOptions& opts) override {
    if (!one_host()) return counted(flat_->barrier(opts));
    return start(OpType::BARRIER, opts, {}, [this] { check(memory_, stoker_comm_barrier(memory_)); });
  }

  // Every error of a barrier names the ranks that are missing, all of them.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    if (!one_host()) return flat_->monitoredBarrier(opts, wait_all_ranks);
    try {
      barrier(opts)->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "Rank ", getRank(), " failed to pass monitoredBarrier: ", error.what());
    }
  }

  Ref<Work> send(Tensors& tensors, int to, int tag) override {
    if (!shares_memory_with(to)) return explained(flat_->send(tensors, to, tag));
    return message(OpType::SEND, local_index(to), tag, expect_single("send", "input", tensors));
  }

  Ref<Work> recv(Tensors& tensors, int from, int tag) override {
    if (!shares_memory_with(from)) return explained(flat_->recv(tensors, from, tag));
    return message(OpType::RECV, local_index(from), tag, expect_single("recv", "output", tensors));
  }

  Ref<Work> recvAnysource(Tensors& tensors, int tag) override {
    check_open();
    if (!shares_memory_) return explained(flat_->recvAnysource(tensors, tag));
    TORCH_CHECK(hosts_ == 1, "recv from any source: this group is on ", hosts_, " hosts, and ccl cannot wait for messages within a "
                "host and between hosts at once; pass src to recv, or use a gloo group");
    return message(OpType::RECVANYSOURCE, kAnySource, tag, expect_single("recv", "output", tensors));
  }

 private:
  static constexpr int64_t kPieceBetweenHosts = 8 << 20;  // bytes; one piece is sent while the next is reduced within the host

  // A child of fork() has a copy of this object but none of its threads, and the shared memory belongs to the parent. Queues are
  // leaked, because their locks and threads may be in any state.
  void leak_in_forked_child() {
    memory_ = nullptr;
    leader_link_.abandon();
    messages_.release();
    new auto(std::make_tuple(queue_, gloo_queue_));
  }

  void check_open() const { TORCH_CHECK(!closed_, "this ccl group has been destroyed"); }

  bool one_host() const {
    check_open();
    return shares_memory_ && hosts_ == 1;
  }

  int local_index(int rank) const {
    return static_cast<int>(std::find(local_ranks_.begin(), local_ranks_.end(), rank) - local_ranks_.begin());
  }

  bool shares_memory_with(int rank) const {
    check_open();
    TORCH_CHECK(rank >= 0 && rank < getSize(), "there is no rank ", rank, " in a group of ", getSize());
    TORCH_CHECK(rank != getRank(), "rank ", rank, " cannot send a message to itself, or receive one from itself");
    return shares_memory_ && local_index(rank) < static_cast<int>(local_ranks_.size());
  }

  // The code of the reduction, if it is defined for the tensor's type. Only leaders divide, so all ranks refuse here what cannot be.
  template <typename Options>
  int expect_reducible(const Options& opts, const at::Tensor& tensor) const {
    const int op = op_code(opts.reduceOp);
    type_code(real_numbers(tensor, op));
    if (hosts_ > 1) averages(opts, tensor);
    return op;
  }

  template <typename Options>
  Ref<Work> start(OpType type, const Options& opts, const Tensors& results, std::function<void()> body) {
    return start(type, opts, results, results, std::move(body));
  }

  // `inputs`: what profiles show; `lists`: how many lists the future divides the results into.
  template <typename Options>
  Ref<Work> start(OpType type, const Options& opts, const Tensors& inputs, const Tensors& results, std::function<void()> body,
                  size_t lists = 1) {
    const double requested = std::chrono::duration<double>(opts.timeout).count();
    const double timeout = requested > 0 ? requested : timeout_;
    ++sequence_;
    auto operation = c10::make_intrusive<Operation>(queue_, getRank(), type, [this, timeout, body = std::move(body)] {
      stoker_comm_timeout(memory_, timeout);
      current_timeout_ = timeout;
      body();
    }, inputs, results, lists);
    queue_->submit(operation, !opts.asyncOp);
    return operation;
  }

  std::vector<at::Tensor> split(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    TORCH_CHECK(tensor.size(0) % getSize() == 0, "alltoall: ", tensor.size(0), " rows cannot be divided among ", getSize(),
                " ranks; pass the split sizes");
    return tensor.split_with_sizes(std::vector<int64_t>(getSize(), tensor.size(0) / getSize()));
  }

  static bool shares_storage(const Tensors& tensors, const at::Tensor& other) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const auto& one) { return one.is_alias_of(other); });
  }

  // The arguments of a collective between one tensor of every rank and a list of the root, with a tensor for each rank.
  struct Rooted {
    at::Tensor own;
    Tensors list;  // empty on other ranks
    int root;
  };

  template <typename T>
  using Named = std::pair<const char*, const T&>;  // "input" or "output", and what was passed

  Rooted rooted(const char* operation, Named<Tensors> own, Named<std::vector<Tensors>> lists, int64_t root) const {
    check_open();
    expect_root(operation, root, getSize());
    Rooted found{expect_single(operation, own.first, own.second), {}, static_cast<int>(root)};
    expect_dense(operation, own.second);
    if (root != getRank()) {
      TORCH_CHECK(lists.second.empty() || lists.second[0].empty(), operation, ": requires empty ", lists.first, " on non-root");
      return found;
    }
    found.list = expect_single(operation, lists.first, lists.second);
    expect_list(operation, lists.first, found.list, getSize());
    expect_dense(operation, found.list);
    return found;
  }

  // In place, on contiguous memory; root -1: on all ranks.
  void reduce_on_host(const at::Tensor& contiguous, int op, int root) {
    const at::Tensor added = real_numbers(contiguous, op);
    check(memory_, stoker_comm_allreduce(memory_, added.data_ptr(), added.numel(), type_code(added), op, root));
  }

  void allreduce_one(const at::Tensor& tensor, int op) {
    const Dense item(tensor);
    if (hosts_ > 1)
      allreduce_or_explain(real_numbers(item.dense, op).view({-1}), op);
    else
      reduce_on_host(item.dense, op, -1);
    item.copy_back();
  }

  void gather_on_host(const Tensors& outputs, const at::Tensor& input) {
    const Dense source(input);
    const auto targets = dense(outputs);
    const auto to = addresses(targets);
    const auto bytes = sizes_in_bytes(targets);
    check(memory_, stoker_comm_allgather(memory_, source.data(), to.data(), bytes.data()));
    for (const auto& target : targets) target.copy_back();
  }

  void expect_gathered(const Tensors& outputs, const at::Tensor& input) const {
    expect_dense("all_gather", outputs);
    expect_dense("all_gather", {input});
    for (const auto& output : outputs) expect_type("all_gather", input, output);
    expect_fit("all_gather, to itself", input, outputs[getRank()]);
  }

  Ref<Work> gather_all(const Tensors& outputs, const at::Tensor& input, const c10d::AllgatherOptions& opts) {
    expect_gathered(outputs, input);
    return start(OpType::ALLGATHER, opts, {input}, outputs, [this, outputs, input] { gather_on_host(outputs, input); });
  }

  // Input i of rank r becomes output r * n + i of each of the n lists.
  Ref<Work> gather_several(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    expect_alike("all_gather", inputs);
    for (const auto& list : outputs) expect_list("all_gather", "output", list, getSize() * static_cast<int>(inputs.size()));
    if (!one_host()) return counted(flat_->allgather(outputs, inputs, opts));
    Tensors results;
    for (const auto& list : outputs) results.insert(results.end(), list.begin(), list.end());
    return start(OpType::ALLGATHER, opts, inputs, results, [this, outputs, inputs] {
      for (size_t i = 0; i < inputs.size(); ++i) {
        Tensors from_ranks;
        for (size_t at = i; at < outputs[0].size(); at += inputs.size()) from_ranks.push_back(outputs[0][at]);
        gather_on_host(from_ranks, inputs[i]);
      }
      for (size_t list = 1; list < outputs.size(); ++list)
        for (size_t at = 0; at < outputs[0].size(); ++at) Dense::write(outputs[list][at], outputs[0][at]);
    }, outputs.size());
  }

  Ref<Work> scatter_reduced(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
    expect_dense("reduce_scatter", inputs);
    expect_dense("reduce_scatter", {output});
    for (const auto& input : inputs) expect_type("reduce_scatter", input, output);
    expect_fit("reduce_scatter", inputs[getRank()], output);
    const int op = expect_reducible(opts, output);
    return start(OpType::REDUCE_SCATTER, opts, inputs, {output}, [this, output, inputs, op] {
      const Dense target(output);
      const auto sources = dense(inputs);
      const auto from = addresses(sources);
      std::vector<int64_t> counts;
      for (const auto& source : sources) counts.push_back(real_numbers(source.dense, op).numel());
      const int type = type_code(real_numbers(target.dense, op));
      check(memory_, stoker_comm_reduce_scatter(memory_, from.data(), target.data(), counts.data(), type, op));
      target.copy_back();
    });
  }

  Ref<Work> allreduce_sparse(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
    const int op = op_code(opts.reduceOp);
    TORCH_CHECK(op == STOKER_SUM || op == STOKER_AVG, "all_reduce: unsupported reduction operation for sparse tensors; use SUM or AVG");
    if (!one_host()) {
      Tensors copy = tensors;
      return counted(flat_->allreduce(copy, opts));
    }
    return start(OpType::_ALLREDUCE_SPARSE, opts, tensors, [this, tensors, op] {
      at::Tensor total = tensors[0];
      for (size_t i = 1; i < tensors.size(); ++i) total = total.add(tensors[i]);
      total = sum_of_sparse(total.coalesce());
      if (op == STOKER_AVG) total.div_(static_cast<int64_t>(getSize() * tensors.size()));
      for (const auto& tensor : tensors) Dense::write(tensor, total);
    });
  }

  // Indices and values of all ranks, one after the other; what has the same index is added.
  at::Tensor sum_of_sparse(const at::Tensor& own) {
    const auto lengths = at::empty({getSize()}, at::kLong);
    gather_on_host(lengths.unbind(), at::full({}, own._nnz(), at::kLong));
    std::vector<int64_t> shape = own._values().sizes().vec();
    Tensors indices, values;
    for (int rank = 0; rank < getSize(); ++rank) {
      shape[0] = lengths[rank].item<int64_t>();
      indices.push_back(at::empty({shape[0], own.sparse_dim()}, at::kLong));
      values.push_back(at::empty(shape, own._values().options()));
    }
    gather_on_host(indices, own._indices().t());
    gather_on_host(values, own._values());
    return at::sparse_coo_tensor(at::cat(indices).t(), at::cat(values), own.sizes()).coalesce();
  }

  Ref<Work> explained(Ref<Work> work) const { return c10::make_intrusive<ExplainedWork>(std::move(work), explain_); }

  // A collective that gloo carries.
  Ref<Work> counted(Ref<Work> work) {
    ++sequence_;
    return explained(std::move(work));
  }

  StartedWork mean(Ref<Work> sum, const at::Tensor& total) const {
    return {std::move(sum), [total, size = getSize()] { total.div_(size); }};
  }

  // For collectives that gloo lacks: its own operation has been started, so that all ranks start theirs in the same order, and
  // `after` turns its result into what was asked for.
  template <typename Options>
  Ref<Work> then(OpType type, const Options& opts, StartedWork started, const Tensors& results) {
    const auto body = [work = counted(std::move(started.work)), after = std::move(started.after)] {
      work->wait(Milliseconds(0));
      after();
    };
    auto operation = c10::make_intrusive<Operation>(gloo_queue_, getRank(), type, body, results, results);
    gloo_queue_->submit(operation, !opts.asyncOp);
    return operation;
  }

  void allreduce_or_explain(const at::Tensor& flat, int op) {
    std::string problem;
    try {
      return allreduce_between_hosts(flat, op);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const pybind11::gil_scoped_acquire gil;
    C10_THROW_ERROR(DistBackendError, explain_(problem));
  }

  // Reduces within the host, then between the leaders, and broadcasts within the host. While one piece is exchanged between the
  // leaders, the next is reduced within the host.
  void allreduce_between_hosts(const at::Tensor& flat, int op) {
    const bool average = op == STOKER_AVG;
    const int local_op = average ? int(STOKER_SUM) : op;
    const int type = type_code(flat);
    const int64_t each = kPieceBetweenHosts / static_cast<int64_t>(flat.element_size());
    std::deque<LeaderLink::Pending> pending;
    const auto finish_first = [&] {
      const LeaderLink::Pending first = pending.front();
      pending.pop_front();
      on_leader([&] {
        leader_link_.wait(first, current_timeout_);
        if (average) first.piece.div_(getSize());
      });
      check(memory_, stoker_comm_broadcast(memory_, first.piece.data_ptr(), static_cast<int64_t>(first.piece.nbytes()), 0));
    };
    for (int64_t at = 0; at == 0 || at < flat.numel(); at += each) {
      const at::Tensor piece = flat.narrow(0, at, std::min(each, flat.numel() - at));
      check(memory_, stoker_comm_allreduce(memory_, piece.data_ptr(), piece.numel(), type, local_op, 0));
      pending.push_back({piece, {}, nullptr});
      on_leader([&] { pending.back() = leader_link_.start_allreduce(piece, local_op, current_timeout_); });
      if (pending.size() > 1) finish_first();
    }
    while (!pending.empty()) finish_first();
  }

  // Runs `body` if this rank leads its host. If it fails, the other ranks of the host, which wait for the leader, fail too.
  template <typename F>
  void on_leader(F&& body) {
    if (!leader_link_.leads()) return;
    std::string problem;
    try {
      return body();
    } catch (const std::exception& error) {
      problem = "communication with another host failed (" + other_hosts_ + "): " + error.what();
    }
    stoker_comm_abort(memory_, problem.c_str());
    C10_THROW_ERROR(DistBackendError, "ccl: " + problem);
  }

  Ref<Work> message(OpType type, int peer, int tag, const at::Tensor& tensor) {
    expect_dense("send and recv", {tensor});
    auto message = c10::make_intrusive<Message>(type, getRank(), peer, tag, tensor, timeout_);
    messages_->post(message);
    return message;
  }

  void* memory_;                                   // handle of stoker.h for the ranks of this host, or null
  const bool shares_memory_ = memory_ != nullptr;  // stays true when the group is destroyed
  std::vector<int> local_ranks_;
  int hosts_;
  LeaderLink leader_link_;
  Ref<c10d::Backend> flat_;  // gloo between all ranks, or null where shared memory connects them
  std::string other_hosts_;  // for error messages
  std::atomic<bool> closed_ = false;
  std::atomic<uint64_t> sequence_ = 0;
  double timeout_, current_timeout_ = 0;
  Explain explain_;
  // The shared-memory operations, and what follows operations of gloo.
  const std::shared_ptr<OperationQueue> queue_ = std::make_shared<OperationQueue>(),
                                        gloo_queue_ = std::make_shared<OperationQueue>();
  std::unique_ptr<Messages> messages_;
  std::mutex memory_mutex_;    // the memory is not destroyed while it is being aborted
  std::mutex shutdown_mutex_;  // one thread may destroy the group while another aborts it
  const pid_t process_ = getpid();
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using pybind11::arg;
  module.def(
      "create",
      [](int rank, int size, uintptr_t shared_memory, std::vector<int> local_ranks, std::vector<int> local_names, int hosts,
         Ref<c10d::Backend> leaders, Ref<c10d::Backend> flat, uintptr_t oneccl_library, uintptr_t oneccl,
         std::vector<bool> oneccl_carries, std::string other_hosts, double timeout, Explain explain) -> Ref<c10d::Backend> {
        LeaderLink link(std::move(leaders), reinterpret_cast<void*>(oneccl_library), reinterpret_cast<void*>(oneccl),
                        std::move(oneccl_carries));
        return c10::make_intrusive<Backend>(rank, size, shared_memory, std::move(local_ranks), std::move(local_names), hosts,
                                            std::move(link), std::move(flat), std::move(other_hosts), timeout, std::move(explain));
      },
      arg("rank"), arg("size"), arg("shared_memory"), arg("local_ranks"), arg("local_names"), arg("hosts"),
      arg("leaders").none(true), arg("flat").none(true), arg("oneccl_library"), arg("oneccl"), arg("oneccl_carries"),
      arg("other_hosts"), arg("timeout"), arg("explain"));
}
