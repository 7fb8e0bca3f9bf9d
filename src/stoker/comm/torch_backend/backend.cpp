// The backend "ccl" as a c10d::Backend, compiled against the torch it runs with (see ../compiled.py).
//
// It turns tensors into addresses (tensors.h) and hands them to the shared-memory engine (engine.h), in the order of the
// group's lane (lane.h). This file holds the collectives.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "between_hosts.h"
#include "engine.h"
#include "lane.h"
#include "named.h"
#include "tensors.h"

namespace {

class Backend : public c10d::Backend {
 public:
  // Source, target, tag, whether it is still wanted -> a channel's group.
  using Opener = std::function<uintptr_t(int, int, int, std::function<bool()>)>;

  Backend(int rank, int size, uintptr_t local, std::vector<int> here, int hosts, Ref<c10d::Backend> leaders,
          Ref<c10d::Backend> flat, uintptr_t wire, std::vector<bool> wire_takes, std::string beyond, double timeout,
          Opener opener, Explain explain)
      : c10d::Backend(rank, size), local_(reinterpret_cast<void*>(local)), here_(std::move(here)), hosts_(hosts),
        leaders_(std::move(leaders)), flat_(std::move(flat)), wire_(reinterpret_cast<void*>(wire)),
        wire_takes_(std::move(wire_takes)), beyond_(std::move(beyond)), timeout_(timeout), opener_(std::move(opener)),
        explain_(std::move(explain)) {}

  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "ccl"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = std::chrono::duration<double>(timeout).count(); }

  // Seconds spent waiting, by the rank of this host that was waited for.
  std::map<int, double> waited() const {
    std::vector<double> seconds(here_.size(), 0.0);
    {
      const std::lock_guard<std::mutex> hold(open_);
      if (local_) engine.waited(local_, seconds.data());
    }
    std::map<int, double> by_rank;
    for (size_t i = 0; i < here_.size(); ++i) by_rank[here_[i]] = seconds[i];
    return by_rank;
  }

  void shutdown() override {
    // Threads that are joined here may want the interpreter to finish what they are at.
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    closed_ = true;
    if (getpid() != process_) {
      local_ = wire_ = nullptr;
      return forget();
    }
    const std::lock_guard<std::mutex> alone(closing_);
    // What was sent is delivered; what is still to be received has nobody left to receive it.
    abort_channels("rank " + std::to_string(getRank()) + " destroyed the group", false);
    for (const auto& channel : channels()) channel->lane->close();
    lane_->close();
    after_->close();
    {
      const std::lock_guard<std::mutex> hold(open_);
      for (auto& [key, channel] : channels_)
        if (void* group = channel->group.exchange(nullptr)) engine.destroy(group);
      channels_.clear();
      if (local_) engine.destroy(local_);
      local_ = nullptr;
    }
    if (wire_) wire_functions.leave(wire_, kLongestFarewell);
    wire_ = nullptr;
  }

  void abort() override {
    if (getpid() != process_) return shutdown();
    wire_ = nullptr;
    closed_ = aborted_ = true;
    const std::string why = "rank " + std::to_string(getRank()) + " aborted the group";
    {
      const std::lock_guard<std::mutex> hold(open_);
      if (local_) engine.abort(local_, why.c_str());
    }
    abort_channels(why, true);
    shutdown();  // gloo cannot be aborted: what it is at ends with its own timeout
  }

  Ref<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    check_open();
    if (!shares_) return named(flat_->allreduce(tensors, opts));
    const int op = op_code(opts.reduceOp);
    auto items = dense(tensors);
    for (const auto& item : items) type_code(item.dense);
    // The leaders alone divide: what they cannot divide is refused here, by all.
    if (hosts_ > 1)
      for (const auto& item : items) averages(opts, item.dense);
    return start(c10d::OpType::ALLREDUCE, opts, tensors, [this, items, op] {
      for (const auto& item : items) {
        if (hosts_ > 1)
          allreduce_or_explain(item.dense.view({-1}), op);
        else
          check(local_, engine.allreduce(local_, item.data(), item.count(), type_code(item.dense), op, -1));
        item.back();
      }
    });
  }

  Ref<Work> allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  Ref<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (!one_host()) return named(flat_->broadcast(tensors, opts));
    Dense item(tensors.at(0));
    const int root = static_cast<int>(opts.rootRank);
    return start(c10d::OpType::BROADCAST, opts, tensors, [this, item, root] {
      check(local_, engine.broadcast(local_, item.data(), item.bytes(), root));
      item.back();
    });
  }

  Ref<Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    if (!one_host() && averages(opts, tensors.at(0)))
      return then(c10d::OpType::REDUCE, opts, mean(flat_->reduce(tensors, summing(opts)), tensors[0]), tensors);
    if (!one_host()) return named(flat_->reduce(tensors, opts));
    Dense item(tensors.at(0));
    const int op = op_code(opts.reduceOp), root = static_cast<int>(opts.rootRank);
    const at::Tensor added = numbers(item.dense, op);
    const int type = type_code(added);
    return start(c10d::OpType::REDUCE, opts, tensors, [this, item, added, op, type, root] {
      check(local_, engine.allreduce(local_, added.data_ptr(), added.numel(), type, op, root));
      item.back();
    });
  }

  Ref<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                      const c10d::AllgatherOptions& opts) override {
    expect_list("all_gather", outputs.at(0), getSize());
    if (!one_host() && !alike(outputs[0]))
      return then(c10d::OpType::ALLGATHER, opts, gather_uneven(*flat_, outputs[0], inputs.at(0), opts), outputs[0]);
    if (!one_host()) return named(flat_->allgather(outputs, inputs, opts));
    return gather_all(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    if (!one_host()) return named(flat_->_allgather_base(output, input, opts));
    expect_fit("all_gather_into_tensor", input, output, getSize(), 1);
    return gather_all(parts(output, getSize()), input, opts);
  }

  Ref<Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced: ", outputs.size(),
                      " lists of outputs for a group of ", getSize(), " ranks; give one for each");
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
    Ref<Work> last;  // a lane keeps the order: when the last is done, all are
    for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
    if (!one_host() && averages(opts, outputs.at(0)))
      return then(c10d::OpType::REDUCE_SCATTER, opts, mean(flat_->reduce_scatter(outputs, inputs, summing(opts)), outputs[0]),
                  outputs);
    if (!one_host()) return named(flat_->reduce_scatter(outputs, inputs, opts));
    return scatter_reduced(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    if (!one_host() && averages(opts, output))
      return then(c10d::OpType::REDUCE_SCATTER, opts, mean(flat_->_reduce_scatter_base(output, input, summing(opts)), output),
                  {output});
    if (!one_host()) return named(flat_->_reduce_scatter_base(output, input, opts));
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
      check(local_, engine.alltoall(local_, from.data(), sent.data(), to.data(), received.data()));
      for (const auto& target : targets) target.back();
    });
  }

  Ref<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    if (!one_host()) return named(flat_->alltoall_base(output, input, output_splits, input_splits, opts));
    auto outputs = split(output, output_splits), inputs = split(input, input_splits);
    return alltoall(outputs, inputs, opts);
  }

  Ref<Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::GatherOptions& opts) override {
    if (!one_host()) return named(flat_->gather(outputs, inputs, opts));
    const int root = static_cast<int>(opts.rootRank);
    Dense source(inputs.at(0));
    if (root == getRank()) {
      expect_list("gather", outputs.at(0), getSize());
      for (const auto& target : outputs[0]) expect_fit("gather", source.tensor, target);
    }
    auto targets = root == getRank() ? dense(outputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::GATHER, opts, inputs, [this, source, targets, root] {
      const auto to = addresses(targets);
      check(local_, engine.gather(local_, source.data(), to.data(), source.bytes(), root));
      for (const auto& target : targets) target.back();
    });
  }

  Ref<Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                    const c10d::ScatterOptions& opts) override {
    if (!one_host()) return named(flat_->scatter(outputs, inputs, opts));
    const int root = static_cast<int>(opts.rootRank);
    Dense target(outputs.at(0));
    if (root == getRank()) {
      expect_list("scatter", inputs.at(0), getSize());
      for (const auto& source : inputs[0]) expect_fit("scatter", source, target.tensor);
    }
    auto sources = root == getRank() ? dense(inputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::SCATTER, opts, outputs, [this, target, sources, root] {
      const auto from = addresses(sources);
      check(local_, engine.scatter(local_, from.data(), target.data(), target.bytes(), root));
      target.back();
    });
  }

  Ref<Work> barrier(const c10d::BarrierOptions& opts) override {
    if (!one_host()) return named(flat_->barrier(opts));
    return start(c10d::OpType::BARRIER, opts, {}, [this] { check(local_, engine.barrier(local_)); });
  }

  Ref<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    if (!reaches(to)) return named(flat_->send(tensors, to, tag));
    return message(c10d::OpType::SEND, getRank(), to, tag, tensors);
  }

  Ref<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (!reaches(from)) return named(flat_->recv(tensors, from, tag));
    return message(c10d::OpType::RECV, from, getRank(), tag, tensors);
  }

  Ref<Work> recvAnysource(std::vector<at::Tensor>&, int) override {
    TORCH_CHECK(false, "ccl receives from a rank that is named; give recv its src");
  }

 private:
  static constexpr int64_t kWirePiece = 8 << 20, kSmallOnWire = 64 << 10;
  static constexpr double kLongestFarewell = 10;

  struct Channel {
    explicit Channel(bool receives) : receives(receives) {}
    const bool receives;
    std::atomic<void*> group = nullptr;
    const std::shared_ptr<Lane> lane = std::make_shared<Lane>();
  };

  std::vector<std::shared_ptr<Channel>> channels() {
    const std::lock_guard<std::mutex> hold(open_);
    std::vector<std::shared_ptr<Channel>> all;
    for (const auto& [key, channel] : channels_) all.push_back(channel);
    return all;
  }

  void abort_channels(const std::string& why, bool sends) {
    const std::lock_guard<std::mutex> hold(open_);
    for (const auto& [key, channel] : channels_) {
      void* const group = channel->group;
      if (group && (sends || channel->receives) && channel->lane->unfinished()) engine.abort(group, why.c_str());
    }
  }

  // A child of fork() has a copy of all this, and none of its threads; the segments and the wire are its parent's.
  // Never destroyed there: locks and threads may be in whatever state they were in over here.
  void forget() { new auto(std::make_tuple(channels_, lane_, after_)); }

  void check_open() const { TORCH_CHECK(!closed_, "this ccl group has been destroyed"); }

  bool one_host() const {
    check_open();
    return shares_ && hosts_ == 1;
  }

  bool reaches(int rank) const {
    check_open();
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "there is no rank ", rank, " in a group of ", getSize());
    return shares_ && std::find(here_.begin(), here_.end(), rank) != here_.end();
  }

  template <typename Options>
  Ref<Work> start(c10d::OpType kind, const Options& opts, std::vector<at::Tensor> results, std::function<void()> run) {
    const double asked = std::chrono::duration<double>(opts.timeout).count();
    const double timeout = asked > 0 ? asked : timeout_;
    auto job = c10::make_intrusive<Job>(lane_, getRank(), kind, [this, timeout, run = std::move(run)] {
      engine.timeout(local_, timeout);
      now_timeout_ = timeout;
      run();
    }, std::move(results));
    lane_->submit(job, !opts.asyncOp);
    return job;
  }

  std::vector<at::Tensor> split(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    TORCH_CHECK(tensor.size(0) % getSize() == 0, "alltoall: ", tensor.size(0), " rows cannot be divided among ", getSize(),
                " ranks; give the splits");
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
      check(local_, engine.allgather(local_, source.data(), to.data(), bytes.data()));
      for (const auto& target : targets) target.back();
    });
  }

  Ref<Work> scatter_reduced(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                            const c10d::ReduceScatterOptions& opts) {
    expect_list("reduce_scatter", inputs, getSize());
    for (const auto& input : inputs) expect_type("reduce_scatter", input, output);
    expect_fit("reduce_scatter", inputs[getRank()], output);
    Dense target(output);
    auto sources = dense(inputs);
    const int op = op_code(opts.reduceOp), type = type_code(numbers(target.dense, op));
    return start(c10d::OpType::REDUCE_SCATTER, opts, {output}, [this, target, sources, type, op] {
      const auto from = addresses(sources);
      std::vector<int64_t> counts;
      for (const auto& source : sources) counts.push_back(numbers(source.dense, op).numel());
      check(local_, engine.reduce_scatter(local_, from.data(), target.data(), counts.data(), type, op));
      target.back();
    });
  }

  // A piece on its way between the hosts: by oneCCL (request), by gloo (work), or, on ranks that do not lead, by neither.
  struct Flight {
    at::Tensor piece;
    Ref<Work> work;
    void* request = nullptr;
  };

  Flight take_off(const at::Tensor& piece, int op) {
    Flight flight{piece, {}, nullptr};
    if (!leaders_) return flight;
    // Truth values travel as bytes: any is their maximum, all their minimum.
    const bool truth = piece.scalar_type() == at::kBool;
    const at::Tensor sent = truth ? piece.view(at::kByte) : piece;
    if (truth && op != STOKER_BXOR)
      op = op == STOKER_PRODUCT || op == STOKER_MIN || op == STOKER_BAND ? STOKER_MIN : STOKER_MAX;
    const int type = type_code(sent);
    const bool half = type == STOKER_BFLOAT16 || type == STOKER_FLOAT16;
    if (wire_ && wire_takes_[2 * half + (sent.nbytes() > kSmallOnWire)] && wire_functions.reduces(type, op)) {
      flight.request = wire_functions.allreduce(wire_, sent.data_ptr(), sent.numel(), type, op);
      return flight;
    }
    static const c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::PRODUCT,
                                                     c10d::ReduceOp::MIN, c10d::ReduceOp::MAX, c10d::ReduceOp::BAND,
                                                     c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR};
    std::vector<at::Tensor> tensors{sent};
    c10d::AllreduceOptions options;
    options.reduceOp = kOps[op];
    options.timeout = Milliseconds(static_cast<int64_t>(now_timeout_ * 1000));
    flight.work = leaders_->allreduce(tensors, options);
    return flight;
  }

  void land(const Flight& flight, bool average) {
    if (!leaders_) return;
    std::string trouble;
    if (flight.request) {
      if (wire_functions.wait(flight.request, now_timeout_)) {
        trouble = wire_functions.error();
        wire_ = nullptr;  // forgotten, not left: leaving would wait for the other hosts
      }
    } else {
      try {
        flight.work->wait();
      } catch (const std::exception& error) {
        trouble = error.what();
      }
    }
    if (!trouble.empty()) fail_between_hosts(trouble);
    if (average) flight.piece.div_(getSize());
  }

  // The other ranks of this host wait for its leader: they are told.
  [[noreturn]] void fail_between_hosts(const std::string& why) {
    const std::string trouble = "the way to another host failed (to " + beyond_ + "): " + why;
    engine.abort(local_, trouble.c_str());
    C10_THROW_ERROR(DistBackendError, "ccl: " + trouble);
  }

  Flight take_off_or_fail(const at::Tensor& piece, int op) {
    std::string trouble;
    try {
      return take_off(piece, op);
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    fail_between_hosts(trouble);
  }

  Ref<Work> named(Ref<Work> work) const { return c10::make_intrusive<Named>(std::move(work), explain_); }

  Begun mean(Ref<Work> sum, const at::Tensor& total) const {
    return {std::move(sum), [total, size = getSize()] { total.div_(size); }};
  }

  // What gloo has no words for: its own operation begins at once, so that all ranks begin theirs in the same order, and `after`
  // makes of it what was asked for.
  template <typename Options>
  Ref<Work> then(c10d::OpType kind, const Options& opts, Begun begun, std::vector<at::Tensor> results) {
    const auto run = [work = named(std::move(begun.work)), after = std::move(begun.after)] {
      work->wait(Milliseconds(0));
      after();
    };
    auto job = c10::make_intrusive<Job>(after_, getRank(), kind, run, std::move(results));
    after_->submit(job, !opts.asyncOp);
    return job;
  }

  void allreduce_or_explain(const at::Tensor& flat, int op) {
    std::string trouble;
    try {
      return allreduce_between_hosts(flat, op);
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    const pybind11::gil_scoped_acquire gil;
    C10_THROW_ERROR(DistBackendError, explain_(trouble));
  }

  // Reduce within the host, between the leaders, and hand out; a piece is on the wire while the next is reduced.
  void allreduce_between_hosts(const at::Tensor& flat, int op) {
    const bool average = op == STOKER_AVG;
    const int inner = average ? int(STOKER_SUM) : op;
    const int type = type_code(flat);
    const int64_t each = kWirePiece / static_cast<int64_t>(flat.element_size());
    std::deque<Flight> flying;
    const auto hand_out = [&] {
      const Flight flight = flying.front();
      flying.pop_front();
      land(flight, average);
      check(local_, engine.broadcast(local_, flight.piece.data_ptr(), static_cast<int64_t>(flight.piece.nbytes()), 0));
    };
    for (int64_t at = 0; at == 0 || at < flat.numel(); at += each) {
      const at::Tensor piece = flat.narrow(0, at, std::min(each, flat.numel() - at));
      check(local_, engine.allreduce(local_, piece.data_ptr(), piece.numel(), type, inner, 0));
      flying.push_back(take_off_or_fail(piece, inner));
      if (flying.size() > 1) hand_out();
    }
    while (!flying.empty()) hand_out();
  }

  // A channel of two ranks per direction and tag, so that no message waits behind another.
  Ref<Work> message(c10d::OpType kind, int from, int to, int tag, const std::vector<at::Tensor>& tensors) {
    Dense item(tensors.at(0));
    std::shared_ptr<Channel> channel;
    {
      const std::lock_guard<std::mutex> hold(open_);
      check_open();  // under the lock: shutdown() sees every channel that is made before
      auto& known = channels_[{from, to, tag}];
      if (!known) known = std::make_shared<Channel>(to == getRank());
      channel = known;
    }
    auto job = c10::make_intrusive<Job>(channel->lane, getRank(), kind, [this, channel = channel.get(), item, from, to, tag] {
      const auto wanted = [this, channel] { return !aborted_ && !(closed_ && channel->receives); };
      if (!channel->group) {
        const pybind11::gil_scoped_acquire gil;
        channel->group = reinterpret_cast<void*>(opener_(from, to, tag, wanted));
      }
      // Whoever closes the group says so first and looks for channels to abort then: one of the two sees the other.
      TORCH_CHECK(wanted(), "this ccl group has been destroyed");
      engine.timeout(channel->group, timeout_);
      check_message(channel->group, engine.broadcast(channel->group, item.data(), item.bytes(), 0));
      if (to == getRank()) item.back();
    }, tensors);
    channel->lane->submit(job, false);
    return job;
  }

  void* local_;
  const bool shares_ = local_ != nullptr;  // stays when the group is destroyed
  std::vector<int> here_;
  int hosts_;
  Ref<c10d::Backend> leaders_, flat_;
  void* wire_;                    // oneCCL between the leaders, or null
  std::vector<bool> wire_takes_;  // small, large, small and 16 bits, large and 16 bits: whether oneCCL is faster than gloo
  std::string beyond_;            // how errors call the other hosts
  std::atomic<bool> closed_ = false, aborted_ = false;
  double timeout_, now_timeout_ = 0;
  Opener opener_;
  Explain explain_;
  // The engine's operations; what follows those of gloo.
  const std::shared_ptr<Lane> lane_ = std::make_shared<Lane>(), after_ = std::make_shared<Lane>();
  std::map<std::tuple<int, int, int>, std::shared_ptr<Channel>> channels_;
  mutable std::mutex open_;  // channels_, and that no group is destroyed while it is aborted
  std::mutex closing_;       // one thread may destroy the group while another aborts it
  const pid_t process_ = getpid();
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("bind_engine", &bind_engine);
  module.def("bind_wire", &bind_wire);
  module.def("waited", [](const Ref<c10d::Backend>& backend) {
    const auto* mine = dynamic_cast<const Backend*>(backend.get());
    return mine ? mine->waited() : std::map<int, double>();
  });
  module.def(
      "create",
      [](int rank, int size, uintptr_t local, std::vector<int> here, int hosts, Ref<c10d::Backend> leaders,
         Ref<c10d::Backend> flat, uintptr_t wire, std::vector<bool> wire_takes, std::string beyond, double timeout,
         Backend::Opener opener, Explain explain) -> Ref<c10d::Backend> {
        return c10::make_intrusive<Backend>(rank, size, local, std::move(here), hosts, std::move(leaders), std::move(flat), wire,
                                            std::move(wire_takes), std::move(beyond), timeout, std::move(opener),
                                            std::move(explain));
      },
      pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("local"), pybind11::arg("here"), pybind11::arg("hosts"),
      pybind11::arg("leaders").none(true), pybind11::arg("flat").none(true), pybind11::arg("wire"),
      pybind11::arg("wire_takes"), pybind11::arg("beyond"), pybind11::arg("timeout"), pybind11::arg("opener"),
      pybind11::arg("explain"));
}
