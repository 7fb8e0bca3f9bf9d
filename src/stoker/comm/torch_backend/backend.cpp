// The backend "ccl" as a c10d::Backend, compiled against the torch it runs with (see ../compiled.py).
//
// It turns tensors into addresses and hands them to the shared-memory engine, whose functions it gets as a table of
// pointers: it links to torch alone. Each group has a lane: operations run in the order they were given, on the lane's
// thread, or on the thread that waits for them, whichever comes first.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

using c10d::Work;
using Milliseconds = std::chrono::milliseconds;
template <typename T>
using Ref = c10::intrusive_ptr<T>;

// The engine's C interface (csrc/comm.cpp), filled in by address from Python.
struct Engine {
  const char* (*error)(void*);
  void (*timeout)(void*, double);
  void (*abort)(void*, const char*);
  void (*destroy)(void*);
  double (*waited)(void*, double*);
  int (*allreduce)(void*, void*, int64_t, int, int, int);
  int (*reduce_scatter)(void*, const void* const*, void*, const int64_t*, int, int);
  int (*allgather)(void*, const void*, void* const*, const int64_t*);
  int (*broadcast)(void*, void*, int64_t, int);
  int (*gather)(void*, const void*, void* const*, int64_t, int);
  int (*scatter)(void*, const void* const*, void*, int64_t, int);
  int (*alltoall)(void*, const void* const*, const int64_t*, void* const*, const int64_t*);
  int (*barrier)(void*);
} engine;

void check(void* group, int code) {
  if (code) C10_THROW_ERROR(DistBackendError, std::string("ccl: ") + engine.error(group));
}

int type_code(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return 0;
    case at::kDouble: return 1;
    case at::kBFloat16: return 2;
    case at::kHalf: return 3;
    case at::kChar: return 4;
    case at::kByte: return 5;
    case at::kShort: return 6;
    case at::kInt: return 7;
    case at::kLong: return 8;
    case at::kBool: return 9;
    default: TORCH_CHECK(false, "ccl cannot reduce ", tensor.scalar_type(), "; it reduces float32, float64, bfloat16, float16, "
                         "int8, uint8, int16, int32, int64 and bool");
  }
}

int op_code(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return 0;
    case c10d::ReduceOp::AVG: return 1;
    case c10d::ReduceOp::PRODUCT: return 2;
    case c10d::ReduceOp::MIN: return 3;
    case c10d::ReduceOp::MAX: return 4;
    case c10d::ReduceOp::BAND: return 5;
    case c10d::ReduceOp::BOR: return 6;
    case c10d::ReduceOp::BXOR: return 7;
    default: TORCH_CHECK(false, "ccl knows the reductions SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR");
  }
}

// A tensor as contiguous memory; back() copies a stand-in's contents to the tensor it stands for.
struct Dense {
  explicit Dense(const at::Tensor& tensor) : tensor(tensor) {
    TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided, "ccl works on dense CPU tensors, not on one of ",
                tensor.layout(), " on ", tensor.device());
    dense = tensor.contiguous();
  }
  void* data() const { return dense.data_ptr(); }
  int64_t count() const { return dense.numel(); }
  int64_t bytes() const { return static_cast<int64_t>(dense.nbytes()); }
  void back() const {
    if (!dense.is_same(tensor)) tensor.detach().copy_(dense);
  }
  at::Tensor tensor, dense;
};

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

std::vector<at::Tensor> parts(const at::Tensor& tensor, int count) {
  const auto flat = tensor.view({-1});
  TORCH_CHECK(flat.numel() % count == 0, "a tensor of ", flat.numel(), " elements cannot be divided among ", count, " ranks");
  const int64_t each = flat.numel() / count;
  std::vector<at::Tensor> all;
  for (int i = 0; i < count; ++i) all.push_back(flat.narrow(0, i * each, each));
  return all;
}

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

class Backend : public c10d::Backend {
 public:
  using Opener = std::function<uintptr_t(int, int, int)>;  // source, target, tag -> a channel's group

  Backend(int rank, int size, uintptr_t local, std::vector<int> here, int hosts, Ref<c10d::Backend> leaders,
          Ref<c10d::Backend> flat, double timeout, Opener opener)
      : c10d::Backend(rank, size), local_(reinterpret_cast<void*>(local)), here_(std::move(here)), hosts_(hosts),
        leaders_(std::move(leaders)), flat_(std::move(flat)), timeout_(timeout), opener_(std::move(opener)) {}

  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "ccl"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = std::chrono::duration<double>(timeout).count(); }

  // Seconds spent waiting, by the rank of this host that was waited for.
  std::map<int, double> waited() const {
    std::vector<double> seconds(here_.size(), 0.0);
    if (local_) engine.waited(local_, seconds.data());
    std::map<int, double> by_rank;
    for (size_t i = 0; i < here_.size(); ++i) by_rank[here_[i]] = seconds[i];
    return by_rank;
  }

  void shutdown() override {
    // Threads that are joined here may want the interpreter to finish what they are at.
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    for (auto& [key, channel] : channels_) {
      channel->lane.close();
      if (channel->group) engine.destroy(channel->group);
      channel->group = nullptr;
    }
    channels_.clear();
    lane_.close();
    if (local_) engine.destroy(local_);
    local_ = nullptr;
  }

  void abort() override {
    if (local_) engine.abort(local_, ("rank " + std::to_string(getRank()) + " aborted the group").c_str());
    shutdown();
  }

  Ref<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    if (!local_) return flat_->allreduce(tensors, opts);
    const int op = op_code(opts.reduceOp);
    auto items = dense(tensors);
    for (const auto& item : items) type_code(item.dense);
    return start(c10d::OpType::ALLREDUCE, opts, tensors, [this, items, op] {
      for (const auto& item : items) {
        if (hosts_ > 1)
          allreduce_between_hosts(item.dense.view({-1}), op);
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
    if (!one_host()) return flat_->broadcast(tensors, opts);
    Dense item(tensors.at(0));
    const int root = static_cast<int>(opts.rootRank);
    return start(c10d::OpType::BROADCAST, opts, tensors, [this, item, root] {
      check(local_, engine.broadcast(local_, item.data(), item.bytes(), root));
      item.back();
    });
  }

  Ref<Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    if (!one_host()) return flat_->reduce(tensors, opts);
    Dense item(tensors.at(0));
    const int op = op_code(opts.reduceOp), type = type_code(item.dense), root = static_cast<int>(opts.rootRank);
    return start(c10d::OpType::REDUCE, opts, tensors, [this, item, op, type, root] {
      check(local_, engine.allreduce(local_, item.data(), item.count(), type, op, root));
      item.back();
    });
  }

  Ref<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                      const c10d::AllgatherOptions& opts) override {
    if (!one_host()) return flat_->allgather(outputs, inputs, opts);
    return gather_all(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    if (!one_host()) return flat_->_allgather_base(output, input, opts);
    return gather_all(parts(output, getSize()), input, opts);
  }

  Ref<Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                            const c10d::AllgatherOptions& opts) override {
    Ref<Work> last;  // a lane keeps the order: when the last is done, all are
    for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ref<Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
    if (!one_host()) return flat_->reduce_scatter(outputs, inputs, opts);
    return scatter_reduced(outputs.at(0), inputs.at(0), opts);
  }

  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    if (!one_host()) return flat_->_reduce_scatter_base(output, input, opts);
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
    if (!one_host()) return flat_->alltoall(outputs, inputs, opts);
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
    if (!one_host()) return flat_->alltoall_base(output, input, output_splits, input_splits, opts);
    auto outputs = split(output, output_splits), inputs = split(input, input_splits);
    return alltoall(outputs, inputs, opts);
  }

  Ref<Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::GatherOptions& opts) override {
    if (!one_host()) return flat_->gather(outputs, inputs, opts);
    const int root = static_cast<int>(opts.rootRank);
    Dense source(inputs.at(0));
    auto targets = root == getRank() ? dense(outputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::GATHER, opts, inputs, [this, source, targets, root] {
      const auto to = addresses(targets);
      check(local_, engine.gather(local_, source.data(), to.data(), source.bytes(), root));
      for (const auto& target : targets) target.back();
    });
  }

  Ref<Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                    const c10d::ScatterOptions& opts) override {
    if (!one_host()) return flat_->scatter(outputs, inputs, opts);
    const int root = static_cast<int>(opts.rootRank);
    Dense target(outputs.at(0));
    auto sources = root == getRank() ? dense(inputs.at(0)) : std::vector<Dense>();
    return start(c10d::OpType::SCATTER, opts, outputs, [this, target, sources, root] {
      const auto from = addresses(sources);
      check(local_, engine.scatter(local_, from.data(), target.data(), target.bytes(), root));
      target.back();
    });
  }

  Ref<Work> barrier(const c10d::BarrierOptions& opts) override {
    if (!one_host()) return flat_->barrier(opts);
    return start(c10d::OpType::BARRIER, opts, {}, [this] { check(local_, engine.barrier(local_)); });
  }

  Ref<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    if (!reaches(to)) return flat_->send(tensors, to, tag);
    return message(c10d::OpType::SEND, getRank(), to, tag, tensors);
  }

  Ref<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (!reaches(from)) return flat_->recv(tensors, from, tag);
    return message(c10d::OpType::RECV, from, getRank(), tag, tensors);
  }

 private:
  struct Channel {
    void* group = nullptr;
    Lane lane;
  };

  bool one_host() const { return local_ && hosts_ == 1; }
  bool reaches(int rank) const { return local_ && std::find(here_.begin(), here_.end(), rank) != here_.end(); }

  template <typename Options>
  Ref<Work> start(c10d::OpType kind, const Options& opts, std::vector<at::Tensor> results, std::function<void()> run) {
    const double asked = std::chrono::duration<double>(opts.timeout).count();
    const double timeout = asked > 0 ? asked : timeout_;
    auto job = c10::make_intrusive<Job>(lane_, getRank(), kind, [this, timeout, run = std::move(run)] {
      engine.timeout(local_, timeout);
      run();
    }, std::move(results));
    lane_.submit(job, !opts.asyncOp);
    return job;
  }

  std::vector<at::Tensor> split(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    TORCH_CHECK(tensor.size(0) % getSize() == 0, "alltoall: ", tensor.size(0), " rows cannot be divided among ", getSize(),
                " ranks; give the splits");
    return tensor.split(std::max<int64_t>(1, tensor.size(0) / getSize()));
  }

  Ref<Work> gather_all(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const c10d::AllgatherOptions& opts) {
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
    Dense target(output);
    auto sources = dense(inputs);
    const int type = type_code(target.dense), op = op_code(opts.reduceOp);
    return start(c10d::OpType::REDUCE_SCATTER, opts, {output}, [this, target, sources, type, op] {
      const auto from = addresses(sources);
      std::vector<int64_t> counts;
      for (const auto& source : sources) counts.push_back(source.count());
      check(local_, engine.reduce_scatter(local_, from.data(), target.data(), counts.data(), type, op));
      target.back();
    });
  }

  // Reduce within the host, between the leaders, and hand out; a piece is on the wire while the next is reduced.
  void allreduce_between_hosts(const at::Tensor& flat, int op) {
    constexpr int64_t kWirePiece = 8 << 20;
    const bool average = op == 1;
    const int inner = average ? 0 : op;
    const int type = type_code(flat);
    const int64_t each = kWirePiece / static_cast<int64_t>(flat.element_size());
    std::deque<std::pair<at::Tensor, Ref<Work>>> flying;
    const auto land = [&] {
      auto [piece, work] = flying.front();
      flying.pop_front();
      if (work) {
        try {
          work->wait();
        } catch (const std::exception& error) {
          engine.abort(local_, (std::string("the way to another host failed: ") + error.what()).c_str());
          throw;
        }
        if (average) piece.div_(getSize());
      }
      check(local_, engine.broadcast(local_, piece.data_ptr(), static_cast<int64_t>(piece.nbytes()), 0));
    };
    static const c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::PRODUCT,
                                                     c10d::ReduceOp::MIN, c10d::ReduceOp::MAX, c10d::ReduceOp::BAND,
                                                     c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR};
    for (int64_t at = 0; at == 0 || at < flat.numel(); at += each) {
      const at::Tensor piece = flat.narrow(0, at, std::min(each, flat.numel() - at));
      check(local_, engine.allreduce(local_, piece.data_ptr(), piece.numel(), type, inner, 0));
      Ref<Work> work;
      if (leaders_) {
        std::vector<at::Tensor> tensors{piece};
        c10d::AllreduceOptions options;
        options.reduceOp = kOps[inner];
        work = leaders_->allreduce(tensors, options);
      }
      flying.emplace_back(piece, work);
      if (flying.size() > 1) land();
    }
    while (!flying.empty()) land();
  }

  // A channel of two ranks per direction and tag, so that no message waits behind another.
  Ref<Work> message(c10d::OpType kind, int from, int to, int tag, const std::vector<at::Tensor>& tensors) {
    Dense item(tensors.at(0));
    auto& channel = channels_[{from, to, tag}];
    if (!channel) channel = std::make_shared<Channel>();
    auto job = c10::make_intrusive<Job>(channel->lane, getRank(), kind, [this, channel = channel.get(), item, from, to, tag] {
      if (!channel->group) {
        const pybind11::gil_scoped_acquire gil;
        channel->group = reinterpret_cast<void*>(opener_(from, to, tag));
      }
      engine.timeout(channel->group, timeout_);
      check(channel->group, engine.broadcast(channel->group, item.data(), item.bytes(), 0));
      if (to == getRank()) item.back();
    }, tensors);
    channel->lane.submit(job, false);
    return job;
  }

  void* local_;
  std::vector<int> here_;
  int hosts_;
  Ref<c10d::Backend> leaders_, flat_;
  double timeout_;
  Opener opener_;
  Lane lane_;
  std::map<std::tuple<int, int, int>, std::shared_ptr<Channel>> channels_;
};

void bind_engine(const std::map<std::string, uintptr_t>& table) {
  const auto take = [&](auto& pointer, const char* name) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(table.at(name));
  };
  take(engine.error, "error");
  take(engine.timeout, "timeout");
  take(engine.abort, "abort");
  take(engine.destroy, "destroy");
  take(engine.waited, "waited");
  take(engine.allreduce, "allreduce");
  take(engine.reduce_scatter, "reduce_scatter");
  take(engine.allgather, "allgather");
  take(engine.broadcast, "broadcast");
  take(engine.gather, "gather");
  take(engine.scatter, "scatter");
  take(engine.alltoall, "alltoall");
  take(engine.barrier, "barrier");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("bind_engine", &bind_engine);
  module.def("waited", [](const Ref<c10d::Backend>& backend) {
    const auto* mine = dynamic_cast<const Backend*>(backend.get());
    return mine ? mine->waited() : std::map<int, double>();
  });
  module.def(
      "create",
      [](int rank, int size, uintptr_t local, std::vector<int> here, int hosts, Ref<c10d::Backend> leaders,
         Ref<c10d::Backend> flat, double timeout, Backend::Opener opener) -> Ref<c10d::Backend> {
        return c10::make_intrusive<Backend>(rank, size, local, std::move(here), hosts, std::move(leaders), std::move(flat),
                                            timeout, std::move(opener));
      },
      pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("local"), pybind11::arg("here"), pybind11::arg("hosts"),
      pybind11::arg("leaders").none(true), pybind11::arg("flat").none(true), pybind11::arg("timeout"),
      pybind11::arg("opener"));
}
