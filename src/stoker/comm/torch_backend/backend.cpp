// The backend "ccl" as a c10d::Backend, compiled against the torch it runs with (see ../compiled.py).
//
// Within a host, tensors become addresses (tensors.h) for the shared-memory collectives of stoker.h, in the order of the group's
// queue (operation_queue.h). Between hosts, allreduce also goes through one leader per host (leader_link.h); everything else is
// left to gloo (gloo_operations.h).
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "explained_work.h"
#include "gloo_operations.h"
#include "leader_link.h"
#include "operation_queue.h"
#include "stoker.h"
#include "tensors.h"

namespace {

void check(void* group, int code) {
  if (code) C10_THROW_ERROR(DistBackendError, std::string("ccl: ") + stoker_comm_error(group));
}

// A message is sent as a broadcast between two ranks; its errors must not speak of a broadcast.
void check_message(void* group, int code) {
  if (!code) return;
  std::string error = stoker_comm_error(group);
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"broadcast of ", "message of "}, {" with root ", " from "}})
    for (size_t at; (at = error.find(from)) != std::string::npos;) error.replace(at, from.size(), to);
  C10_THROW_ERROR(DistBackendError, "ccl: " + error);
}

class Backend : public c10d::Backend {
 public:
  // Source, target, tag, whether the channel is still wanted -> the channel's handle of stoker.h.
  using OpenChannel = std::function<uintptr_t(int, int, int, std::function<bool()>)>;

  Backend(int rank, int size, uintptr_t shared_memory, std::vector<int> local_ranks, int hosts, LeaderLink leader_link,
          Ref<c10d::Backend> flat, std::string other_hosts, double timeout, Explain explain, OpenChannel open_channel)
      : c10d::Backend(rank, size), memory_(reinterpret_cast<void*>(shared_memory)), local_ranks_(std::move(local_ranks)),
        hosts_(hosts), leader_link_(std::move(leader_link)), flat_(std::move(flat)), other_hosts_(std::move(other_hosts)),
        timeout_(timeout), explain_(std::move(explain)), open_channel_(std::move(open_channel)) {}

  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "ccl"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = std::chrono::duration<double>(timeout).count(); }

  void shutdown() override {
    // The threads joined below may need the interpreter to finish what they are running.
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    closed_ = true;
    if (getpid() != process_) return leak_in_forked_child();
    const std::lock_guard<std::mutex> only_one(shutdown_mutex_);
    // Messages that were sent are delivered; nobody is left for those still to be received.
    abort_channels("rank " + std::to_string(getRank()) + " destroyed the group", false);
    for (const auto& channel : channels()) channel->queue->close();
    queue_->close();
    gloo_queue_->close();
    {
      const std::lock_guard<std::mutex> lock(handles_mutex_);
      for (auto& [key, channel] : channels_)
        if (void* group = channel->group.exchange(nullptr)) stoker_comm_destroy(group);
      channels_.clear();
      if (memory_) stoker_comm_destroy(memory_);
      memory_ = nullptr;
    }
    leader_link_.close();
  }

  void abort() override {
    if (getpid() != process_) return shutdown();
    leader_link_.abandon();
    closed_ = aborted_ = true;
    const std::string why = "rank " + std::to_string(getRank()) + " aborted the group";
    {
      const std::lock_guard<std::mutex> lock(handles_mutex_);
      if (memory_) stoker_comm_abort(memory_, why.c_str());
    }
    abort_channels(why, true);
    shutdown();  // gloo cannot be aborted: its operations end with their own timeout
  }

  Ref<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    check_open();
    if (!shares_memory_) return explained(flat_->allreduce(tensors, opts));
    const int op = op_code(opts.reduceOp);
    auto items = dense(tensors);
    for (const auto& item : items) type_code(item.dense);
    // Only the leaders divide, so all ranks refuse here what cannot be divided.
    if (hosts_ > 1)
      for (const auto& item : items) averages(opts, item.dense);
    return start(c10d::OpType::ALLREDUCE, opts, tensors, [this, items, op] {
      for (const auto& item : items) {
        if (hosts_ > 1)
          allreduce_or_explain(item.dense.view({-1}), op);
        else
          check(memory_, stoker_comm_allreduce(memory_, item.data(), item.count(), type_code(item.dense), op, -1));
        item.copy_back();
      }
    });
  }

  Ref<Work> allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  Ref<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (!one_host()) return explained(flat_->broadcast(tensors, opts));
    Dense item(tensors.at(0));
    const int root = static_cast<int>(opts.rootRank);
    return start(c10d::OpType::BROADCAST, opts, tensors, [this, item, root] {
      check(memory_, stoker_comm_broadcast(memory_, item.data(), item.bytes(), root));
      item.copy_back();
    });
  }

  Ref<Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    if (!one_host() && averages(opts, tensors.at(0)))
      return then(c10d::OpType::REDUCE, opts, mean(flat_->reduce(tensors, with_sum(opts)), tensors[0]), tensors);
    if (!one_host()) return explained(flat_->reduce(tensors, opts));
    Dense item(tensors.at(0));
    const int op = op_code(opts.reduceOp), root = static_cast<int>(opts.rootRank);
    const at::Tensor added = real_numbers(item.dense, op);
    const int type = type_code(added);
    return start(c10d::OpType::REDUCE, opts, tensors, [this, item, added, op, type, root] {
      check(memory_, stoker_comm_allreduce(memory_, added.data_ptr(), added.numel(), type, op, root));
      item.copy_back();
    });
  }

  Ref<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                      const c10d::AllgatherOptions& opts) override {
    expect_list("all_gather", outputs.at(0), getSize());
    if (!one_host() && !same_sizes(outputs[0]))
      return then(c10d::OpType::ALLGATHER, opts, gather_uneven(*flat_, outputs[0], inputs.at(0), opts), outputs[0]);
    if (!one_host()) return explained(flat_->allgather(outputs, inputs, opts));
    return gather_all(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    if (!one_host()) return explained(flat_->_allgather_base(output, input, opts));
    expect_fit("all_gather_into_tensor", input, output, getSize(), 1);
    return gather_all(parts(output, getSize()), input, opts);
  }

  Ref<Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced: ", outputs.size(),
                      " lists of outputs for a group of ", getSize(), " ranks; pass one for each");
    Ref<Work> last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<std::vector<at::Tensor>> by_rank(1);
      for (const auto& list : outputs) {
        TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: ", inputs.size(), " inputs, and ", list.size(),
                          " outputs for a rank");
        by_rank[0].push_back(list[i]);
      }
      std::vector<at::Tensor> input{inputs[i]};
      last = allgather(by_rank, input, opts);
    }
    return last;
  }

  Ref<Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                            const c10d::AllgatherOptions& opts) override {
    Ref<Work> last;  // operations run in order: when the last is done, all are
    for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
    if (!one_host() && averages(opts, outputs.at(0)))
      return then(c10d::OpType::REDUCE_SCATTER, opts, mean(flat_->reduce_scatter(outputs, inputs, with_sum(opts)), outputs[0]),
                  outputs);
    if (!one_host()) return explained(flat_->reduce_scatter(outputs, inputs, opts));
    return scatter_reduced(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    if (!one_host() && averages(opts, output))
      return then(c10d::OpType::REDUCE_SCATTER, opts, mean(flat_->_reduce_scatter_base(output, input, with_sum(opts)), output),
                  {output});
    if (!one_host()) return explained(flat_->_reduce_scatter_base(output, input, opts));
    expect_fit("reduce_scatter_tensor", input, output, 1, getSize());
    return scatter_reduced(output, parts(input, getSize()), opts);
  }

  Ref<Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
    Ref<Work> last;
    for (size_t i = 0; i < outputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                     const c10d::AllToAllOptions& opts) override {
    expect_list("all_to_all", inputs, getSize());
    expect_list("all_to_all", outputs, getSize());
    for (const auto& tensor : inputs) expect_type("all_to_all", inputs[0], tensor);
    for (const auto& tensor : outputs) expect_type("all_to_all", inputs[0], tensor);
    expect_fit("all_to_all, to itself", inputs[getRank()], outputs[getRank()]);
    if (!one_host()) return then(c10d::OpType::ALLTOALL, opts, exchange_lists(*flat_, outputs, inputs, opts), outputs);
    auto sources = dense(inputs), targets = dense(outputs);
    return start(c10d::OpType::ALLTOALL, opts, outputs, [this, sources, targets] {
      const auto from = addresses(sources), to = addresses(targets);
      const auto sent = sizes_in_bytes(sources), received = sizes_in_bytes(targets);
      check(memory_, stoker_comm_alltoall(memory_, from.data(), sent.data(), to.data(), received.data()));
      for (const auto& target : targets) target.copy_back();
    });
  }

  Ref<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    if (!one_host()) return explained(flat_->alltoall_base(output, input, output_splits, input_splits, opts));
    auto outputs = split(output, output_splits), inputs = split(input, input_splits);
    return alltoall(outputs, inputs, opts);
  }

  Ref<Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::GatherOptions& opts) override {
    if (!one_host()) return explained(flat_->gather(outputs, inputs, opts));
    const int root = static_cast<int>(opts.rootRank);
    Dense source(inputs.at(0));
    if (root == getRank()) {
      expect_list("gather", outputs.at(0), getSize());
      for (const auto& target : outputs[0]) expect_fit("gather", source.tensor, target);
    }
    auto targets = root == getRank() ? dense(outputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::GATHER, opts, inputs, [this, source, targets, root] {
      const auto to = addresses(targets);
      check(memory_, stoker_comm_gather(memory_, source.data(), to.data(), source.bytes(), root));
      for (const auto& target : targets) target.copy_back();
    });
  }

  Ref<Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                    const c10d::ScatterOptions& opts) override {
    if (!one_host()) return explained(flat_->scatter(outputs, inputs, opts));
    const int root = static_cast<int>(opts.rootRank);
    Dense target(outputs.at(0));
    if (root == getRank()) {
      expect_list("scatter", inputs.at(0), getSize());
      for (const auto& source : inputs[0]) expect_fit("scatter", source, target.tensor);
    }
    auto sources = root == getRank() ? dense(inputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::SCATTER, opts, outputs, [this, target, sources, root] {
      const auto from = addresses(sources);
      check(memory_, stoker_comm_scatter(memory_, from.data(), target.data(), target.bytes(), root));
      target.copy_back();
    });
  }

  Ref<Work> barrier(const c10d::BarrierOptions& opts) override {
    if (!one_host()) return explained(flat_->barrier(opts));
    return start(c10d::OpType::BARRIER, opts, {}, [this] { check(memory_, stoker_comm_barrier(memory_)); });
  }

  Ref<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    if (!shares_memory_with(to)) return explained(flat_->send(tensors, to, tag));
    return message(c10d::OpType::SEND, getRank(), to, tag, tensors);
  }

  Ref<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (!shares_memory_with(from)) return explained(flat_->recv(tensors, from, tag));
    return message(c10d::OpType::RECV, from, getRank(), tag, tensors);
  }

  Ref<Work> recvAnysource(std::vector<at::Tensor>&, int) override {
    TORCH_CHECK(false, "ccl cannot receive from any source; pass src to recv");
  }

 private:
  static constexpr int64_t kPieceBetweenHosts = 8 << 20;  // bytes; one piece is sent while the next is reduced within the host

  struct Channel {
    explicit Channel(bool receives) : receives(receives) {}
    const bool receives;
    std::atomic<void*> group = nullptr;
    const std::shared_ptr<OperationQueue> queue = std::make_shared<OperationQueue>();
  };

  std::vector<std::shared_ptr<Channel>> channels() {
    const std::lock_guard<std::mutex> lock(handles_mutex_);
    std::vector<std::shared_ptr<Channel>> all;
    for (const auto& [key, channel] : channels_) all.push_back(channel);
    return all;
  }

  void abort_channels(const std::string& why, bool sending_too) {
    const std::lock_guard<std::mutex> lock(handles_mutex_);
    for (const auto& [key, channel] : channels_) {
      void* const group = channel->group;
      if (group && (sending_too || channel->receives) && channel->queue->has_unfinished()) stoker_comm_abort(group, why.c_str());
    }
  }

  // A child of fork() has a copy of this object but none of its threads, and the shared memory belongs to the parent. Queues are
  // leaked, because their locks and threads may be in any state.
  void leak_in_forked_child() {
    memory_ = nullptr;
    leader_link_.abandon();
    new auto(std::make_tuple(channels_, queue_, gloo_queue_));
  }

  void check_open() const { TORCH_CHECK(!closed_, "this ccl group has been destroyed"); }

  bool one_host() const {
    check_open();
    return shares_memory_ && hosts_ == 1;
  }

  bool shares_memory_with(int rank) const {
    check_open();
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "there is no rank ", rank, " in a group of ", getSize());
    return shares_memory_ && std::find(local_ranks_.begin(), local_ranks_.end(), rank) != local_ranks_.end();
  }

  template <typename Options>
  Ref<Work> start(c10d::OpType type, const Options& opts, std::vector<at::Tensor> results, std::function<void()> body) {
    const double requested = std::chrono::duration<double>(opts.timeout).count();
    const double timeout = requested > 0 ? requested : timeout_;
    auto operation = c10::make_intrusive<Operation>(queue_, getRank(), type, [this, timeout, body = std::move(body)] {
      stoker_comm_timeout(memory_, timeout);
      current_timeout_ = timeout;
      body();
    }, std::move(results));
    queue_->submit(operation, !opts.asyncOp);
    return operation;
  }

  std::vector<at::Tensor> split(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    TORCH_CHECK(tensor.size(0) % getSize() == 0, "alltoall: ", tensor.size(0), " rows cannot be divided among ", getSize(),
                " ranks; pass the split sizes");
    return tensor.split_with_sizes(std::vector<int64_t>(getSize(), tensor.size(0) / getSize()));
  }

  Ref<Work> gather_all(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const c10d::AllgatherOptions& opts) {
    for (const auto& output : outputs) expect_type("all_gather", input, output);
    expect_fit("all_gather, to itself", input, outputs[getRank()]);
    Dense source(input);
    auto targets = dense(outputs);
    return start(c10d::OpType::ALLGATHER, opts, outputs, [this, source, targets] {
      const auto to = addresses(targets);
      const auto bytes = sizes_in_bytes(targets);
      check(memory_, stoker_comm_allgather(memory_, source.data(), to.data(), bytes.data()));
      for (const auto& target : targets) target.copy_back();
    });
  }

  Ref<Work> scatter_reduced(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                            const c10d::ReduceScatterOptions& opts) {
    expect_list("reduce_scatter", inputs, getSize());
    for (const auto& input : inputs) expect_type("reduce_scatter", input, output);
    expect_fit("reduce_scatter", inputs[getRank()], output);
    Dense target(output);
    auto sources = dense(inputs);
    const int op = op_code(opts.reduceOp), type = type_code(real_numbers(target.dense, op));
    return start(c10d::OpType::REDUCE_SCATTER, opts, {output}, [this, target, sources, type, op] {
      const auto from = addresses(sources);
      std::vector<int64_t> counts;
      for (const auto& source : sources) counts.push_back(real_numbers(source.dense, op).numel());
      check(memory_, stoker_comm_reduce_scatter(memory_, from.data(), target.data(), counts.data(), type, op));
      target.copy_back();
    });
  }

  Ref<Work> explained(Ref<Work> work) const { return c10::make_intrusive<ExplainedWork>(std::move(work), explain_); }

  StartedWork mean(Ref<Work> sum, const at::Tensor& total) const {
    return {std::move(sum), [total, size = getSize()] { total.div_(size); }};
  }

  // For collectives that gloo lacks: its own operation has been started, so that all ranks start theirs in the same order, and
  // `after` turns its result into what was asked for.
  template <typename Options>
  Ref<Work> then(c10d::OpType type, const Options& opts, StartedWork started, std::vector<at::Tensor> results) {
    const auto body = [work = explained(std::move(started.work)), after = std::move(started.after)] {
      work->wait(Milliseconds(0));
      after();
    };
    auto operation = c10::make_intrusive<Operation>(gloo_queue_, getRank(), type, body, std::move(results));
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

  // One channel per pair of ranks, direction and tag, so that no message waits behind another.
  Ref<Work> message(c10d::OpType type, int from, int to, int tag, const std::vector<at::Tensor>& tensors) {
    Dense item(tensors.at(0));
    std::shared_ptr<Channel> channel;
    {
      const std::lock_guard<std::mutex> lock(handles_mutex_);
      check_open();  // with the lock held: shutdown() sees every channel that was made before
      auto& known = channels_[{from, to, tag}];
      if (!known) known = std::make_shared<Channel>(to == getRank());
      channel = known;
    }
    auto operation = c10::make_intrusive<Operation>(channel->queue, getRank(), type, [=, this, channel = channel.get()] {
      const auto wanted = [this, channel] { return !aborted_ && !(closed_ && channel->receives); };
      if (!channel->group) {
        const pybind11::gil_scoped_acquire gil;
        channel->group = reinterpret_cast<void*>(open_channel_(from, to, tag, wanted));
      }
      // shutdown() sets closed_ before it looks for channels to abort, so either it sees this channel or this sees closed_.
      TORCH_CHECK(wanted(), "this ccl group has been destroyed");
      stoker_comm_timeout(channel->group, timeout_);
      check_message(channel->group, stoker_comm_broadcast(channel->group, item.data(), item.bytes(), 0));
      if (to == getRank()) item.copy_back();
    }, tensors);
    channel->queue->submit(operation, false);
    return operation;
  }

  void* memory_;                                   // handle of stoker.h for the ranks of this host, or null
  const bool shares_memory_ = memory_ != nullptr;  // stays true when the group is destroyed
  std::vector<int> local_ranks_;
  int hosts_;
  LeaderLink leader_link_;
  Ref<c10d::Backend> flat_;  // gloo between all ranks, or null where shared memory connects them
  std::string other_hosts_;  // for error messages
  std::atomic<bool> closed_ = false, aborted_ = false;
  double timeout_, current_timeout_ = 0;
  Explain explain_;
  OpenChannel open_channel_;
  // The shared-memory operations, and what follows operations of gloo.
  const std::shared_ptr<OperationQueue> queue_ = std::make_shared<OperationQueue>(),
                                        gloo_queue_ = std::make_shared<OperationQueue>();
  std::map<std::tuple<int, int, int>, std::shared_ptr<Channel>> channels_;
  std::mutex handles_mutex_;   // protects channels_; no handle is destroyed while it is being aborted
  std::mutex shutdown_mutex_;  // one thread may destroy the group while another aborts it
  const pid_t process_ = getpid();
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using pybind11::arg;
  module.def(
      "create",
      [](int rank, int size, uintptr_t shared_memory, std::vector<int> local_ranks, int hosts, Ref<c10d::Backend> leaders,
         Ref<c10d::Backend> flat, uintptr_t oneccl_library, uintptr_t oneccl, std::vector<bool> oneccl_carries,
         std::string other_hosts, double timeout, Explain explain, Backend::OpenChannel open_channel) -> Ref<c10d::Backend> {
        LeaderLink link(std::move(leaders), reinterpret_cast<void*>(oneccl_library), reinterpret_cast<void*>(oneccl),
                        std::move(oneccl_carries));
        return c10::make_intrusive<Backend>(rank, size, shared_memory, std::move(local_ranks), hosts, std::move(link),
                                            std::move(flat), std::move(other_hosts), timeout, std::move(explain),
                                            std::move(open_channel));
      },
      arg("rank"), arg("size"), arg("shared_memory"), arg("local_ranks"), arg("hosts"), arg("leaders").none(true),
      arg("flat").none(true), arg("oneccl_library"), arg("oneccl"), arg("oneccl_carries"), arg("other_hosts"), arg("timeout"),
      arg("explain"), arg("open_channel"));
}
