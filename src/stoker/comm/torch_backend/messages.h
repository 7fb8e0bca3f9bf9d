// Messages between two ranks of a host. One pipe of bytes leads from every rank to every other (stoker.h); a message is an
// envelope and its data, in the order of sending, and the receiver matches it with a request of the same tag. A message that
// comes before its request is kept, if another request from that rank is waiting behind it; otherwise it stays in the pipe, and
// the sender waits when the pipe is full.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <string_view>
#include <thread>

#include "communication_cpus.h"
#include "result_work.h"
#include "stoker.h"
#include "tensors.h"

namespace {

constexpr int kAnySource = -1;

class Message : public ResultWork {
 public:
  using Clock = std::chrono::steady_clock;

  Message(c10d::OpType type, int rank, int peer, int tag, const at::Tensor& tensor, double timeout)
      : ResultWork(rank, type, {tensor}, {tensor}), peer(peer), tag(tag), timeout(timeout), item_(tensor) {}

  bool wait(Milliseconds limit) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto completed = [this] { return completed_; };
    if (limit.count() > 0)
      cv_.wait_for(lock, limit, completed);
    else
      cv_.wait(lock, completed);
    const bool done = completed_;
    lock.unlock();
    return result_of_wait(done, limit);
  }

  int sourceRank() const override { return source; }

  bool sends() const { return opType_ == c10d::OpType::SEND; }
  bool accepts(int from, int message_tag) const { return tag == message_tag && (peer == kAnySource || peer == from); }
  char* data() const { return static_cast<char*>(item_.data()); }
  int64_t bytes() const { return item_.bytes(); }
  bool late(Clock::time_point now) const { return std::chrono::duration<double>(now - start_).count() > timeout; }

  void fail(const std::string& why) {
    failure_ = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, "ccl: " + why));
  }
  void end() {
    if (!failure_ && !sends()) item_.copy_back();
    complete(failure_);
  }

  const int peer, tag;
  const double timeout;
  int source = kAnySource;  // of a message that was received
  int64_t moved = 0;        // bytes of envelope and data that were sent

 private:
  const Clock::time_point start_ = Clock::now();
  const Dense item_;
  std::exception_ptr failure_;
};

class Messages {
 public:
  // `names`: the ranks' numbers in error messages.
  Messages(void* memory, int rank, std::vector<int> names)
      : memory_(memory), rank_(rank), names_(std::move(names)), outgoing_(names_.size()), incoming_(names_.size()),
        broken_(names_.size(), 0) {}

  ~Messages() { close("this ccl group has been destroyed", true); }

  void post(const Ref<Message>& message) {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!closed_, "this ccl group has been destroyed");
    TORCH_CHECK(!message->sends() || !broken_[message->peer], "ccl: ", kBroken);
    if (message->sends())
      outgoing_[message->peer].push_back(message);
    else if (!take_kept(message))
      receives_.push_back(message);
    for (int pass = 0; pass < kPassesOfCaller && advance(); ++pass) {
    }
    if (waiting()) {
      if (!thread_.joinable()) thread_ = std::thread([this] { drive(); });
      change_.notify_all();
      stoker_comm_ring(memory_);
    }
    end_done(lock);
  }

  // Receives end with the reason `why`; messages that are being sent are still delivered, unless `sending_too`. May be called
  // again, also while another call waits for the delivery.
  void close(const std::string& why, bool sending_too) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    fail_if([&](const Message& one) { return sending_too || !one.sends() ? why : std::string(); });
    end_done(lock);
    lock.lock();
    if (!thread_.joinable() || thread_.get_id() == std::this_thread::get_id()) return;  // or another thread waits for it
    change_.notify_all();
    stoker_comm_ring(memory_);
    std::thread ending = std::move(thread_);
    lock.unlock();
    ending.join();
  }

 private:
  struct Envelope {
    int64_t tag, bytes;
  };

  // The message that is being read from a pipe.
  struct Incoming {
    Envelope envelope;
    int64_t moved = 0;      // bytes of envelope and data that were read
    Ref<Message> receiver;  // null: the data goes to `kept`
    std::vector<char> kept;
    bool dropped = false;  // its receiver has failed
  };

  struct Kept {
    int source, tag;
    std::vector<char> data;
  };

  bool sending() const {
    return std::any_of(outgoing_.begin(), outgoing_.end(), [](const auto& queue) { return !queue.empty(); });
  }

  bool waiting() const {
    return !receives_.empty() || sending() ||
           std::any_of(incoming_.begin(), incoming_.end(), [](const auto& one) { return one.receiver || one.dropped; });
  }

  // Moves what can be moved at once; false if nothing could.
  bool advance() {
    bool any = false;
    for (int to = 0; to < static_cast<int>(outgoing_.size()); ++to) any |= send_some(to);
    for (int from = 0; from < static_cast<int>(incoming_.size()); ++from) any |= receive_some(from);
    return any;
  }

  bool send_some(int to) {
    auto& queue = outgoing_[to];
    if (queue.empty()) return false;
    const Ref<Message> message = queue.front();
    const Envelope envelope{message->tag, message->bytes()};
    constexpr int64_t head = sizeof(Envelope);
    const bool at_envelope = message->moved < head;
    const char* from = at_envelope ? reinterpret_cast<const char*>(&envelope) + message->moved : message->data() + message->moved - head;
    const int64_t moved = stoker_comm_write(memory_, to, from, (at_envelope ? head : head + message->bytes()) - message->moved);
    if (moved < 0) message->fail(stoker_comm_opening_error());
    message->moved += std::max<int64_t>(moved, 0);
    if (moved < 0 || message->moved == head + message->bytes()) {
      done_.push_back(message);
      queue.pop_front();
      return true;
    }
    return moved > 0;
  }

  bool receive_some(int from) {
    Incoming& one = incoming_[from];
    constexpr int64_t head = sizeof(Envelope);
    if (!one.receiver && !one.dropped && !expects(from)) return false;
    if (one.moved < head) {
      const int64_t moved = stoker_comm_read(memory_, from, reinterpret_cast<char*>(&one.envelope) + one.moved, head - one.moved);
      one.moved += moved;
      if (one.moved == head) open(from, one);
      return moved > 0;
    }
    char* to = one.receiver ? one.receiver->data() : one.kept.data();
    const int64_t moved = stoker_comm_read(memory_, from, to + one.moved - head, one.envelope.bytes + head - one.moved);
    one.moved += moved;
    if (one.moved < head + one.envelope.bytes) return moved > 0;
    Incoming complete = std::move(one);
    one = Incoming();
    deliver(from, complete);
    return true;
  }

  bool expects(int from) const {
    return std::any_of(receives_.begin(), receives_.end(), [&](const auto& one) { return one->peer == kAnySource || one->peer == from; });
  }

  // The envelope has been read: the data goes to the first request that accepts it, if there is one.
  void open(int from, Incoming& one) {
    const auto found = find_receiver(from, static_cast<int>(one.envelope.tag));
    if (found && fits(found, from, one.envelope.bytes)) {
      one.receiver = found;
    } else {
      one.dropped = static_cast<bool>(found);
      one.kept.resize(one.envelope.bytes);
    }
  }

  void deliver(int from, Incoming& one) {
    if (one.receiver) {
      one.receiver->source = from;
      done_.push_back(one.receiver);
    } else if (!one.dropped) {
      kept_.push_back({from, static_cast<int>(one.envelope.tag), std::move(one.kept)});
      if (const auto receiver = find_receiver(from, kept_.back().tag)) take_kept(receiver);  // asked for meanwhile
    }
  }

  // Removes the first request that accepts the message from the list.
  Ref<Message> find_receiver(int from, int tag) {
    const auto at = std::find_if(receives_.begin(), receives_.end(), [&](const auto& one) { return one->accepts(from, tag); });
    if (at == receives_.end()) return {};
    const Ref<Message> found = *at;
    receives_.erase(at);
    return found;
  }

  bool take_kept(const Ref<Message>& message) {
    const auto at = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& one) { return message->accepts(one.source, one.tag); });
    if (at == kept_.end()) return false;
    if (fits(message, at->source, static_cast<int64_t>(at->data.size()))) {
      std::copy(at->data.begin(), at->data.end(), message->data());
      message->source = at->source;
      done_.push_back(message);
    }
    kept_.erase(at);
    return true;
  }

  bool fits(const Ref<Message>& message, int from, int64_t bytes) {
    if (message->bytes() == bytes) return true;
    message->fail(name(from) + " sent a message of " + std::to_string(bytes) + " bytes with tag " + std::to_string(message->tag) +
                  ", and " + name(rank_) + " receives into a tensor of " + std::to_string(message->bytes()) + " bytes");
    done_.push_back(message);
    return false;
  }

  void drive() {
    move_to_communication_cpus();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const int64_t seen = stoker_comm_bell(memory_);
      const std::vector<const char*> gone = slept_in_vain_ ? gone_ranks() : std::vector<const char*>(names_.size(), nullptr);
      const bool moved = advance();
      if (!moved) fail_if([&](const Message& one) { return reason_to_give_up(one, gone); });
      if (!done_.empty()) {
        end_done(lock);
        lock.lock();
      } else if (closed_ && !sending()) {
        return;
      } else if (!waiting()) {
        change_.wait(lock);
      } else if (!moved) {
        lock.unlock();
        slept_in_vain_ = !stoker_comm_sleep(memory_, seen, kLongestSleep);
        lock.lock();
      }
    }
  }

  std::vector<const char*> gone_ranks() const {
    std::vector<const char*> all;
    for (int rank = 0; rank < static_cast<int>(names_.size()); ++rank) all.push_back(stoker_comm_gone(memory_, rank));
    return all;
  }

  // Empty: go on waiting. A rank that has left or died can send nothing more, and its pipe is empty. A message from any source
  // may still come from the others when one has left, but a rank that has died is an error of the whole job. If a rank has given
  // up, the group cannot be used any more.
  std::string reason_to_give_up(const Message& one, const std::vector<const char*>& gone) const {
    const bool any = one.peer == kAnySource;
    size_t left = 0;
    for (int rank = 0; rank < static_cast<int>(gone.size()); ++rank) {
      if (!gone[rank]) continue;
      const std::string_view what = gone[rank];
      if (one.peer == rank || (any && what == "has died") || what.rfind("gave up", 0) == 0)
        return name(rank) + " " + gone[rank] + "; " + name(rank_) + " was " + describe(one);
      ++left;
    }
    if (any && left + 1 == gone.size()) return "all other ranks have left the group; " + name(rank_) + " was " + describe(one);
    if (!one.late(Message::Clock::now())) return "";
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%.3g", one.timeout);
    return "timeout after " + std::string(waited) + " s: " + name(rank_) + " was " + describe(one);
  }

  std::string describe(const Message& one) const {
    const std::string other = one.peer == kAnySource ? "any rank" : name(one.peer);
    return (one.sends() ? "sending a message to " : "waiting for a message from ") + other + " with tag " + std::to_string(one.tag);
  }

  // Ends the messages for which reason(message) is not empty.
  template <typename F>
  void fail_if(F&& reason) {
    const auto end_one = [&](const Ref<Message>& message) {
      const std::string why = reason(*message);
      if (why.empty()) return false;
      message->fail(why);
      done_.push_back(message);
      return true;
    };
    receives_.remove_if(end_one);
    for (auto& one : incoming_)
      if (one.receiver && end_one(one.receiver)) {  // what is left of its data is read and dropped
        one.receiver = {};
        one.dropped = true;
        one.kept.resize(one.envelope.bytes);
      }
    for (size_t to = 0; to < outgoing_.size(); ++to)
      for (auto& queue = outgoing_[to]; !queue.empty() && (broken_[to] || end_one(queue.front())); queue.pop_front()) {
        if (broken_[to]) {
          queue.front()->fail(kBroken);
          done_.push_back(queue.front());
        }
        broken_[to] |= queue.front()->moved > 0;  // what follows would be read as the rest of it
      }
  }

  // Without the lock, because callbacks may send and receive.
  void end_done(std::unique_lock<std::mutex>& lock) {
    const std::vector<Ref<Message>> ended = std::move(done_);
    done_.clear();
    lock.unlock();
    for (const auto& message : ended) message->end();
  }

  std::string name(int rank) const { return "rank " + std::to_string(names_[rank]); }

  static constexpr const char* kBroken = "an earlier message to the same rank was not delivered completely";
  static constexpr int kPassesOfCaller = 4;  // enough for a small message; what takes longer is left to the thread
  static constexpr double kLongestSleep = 0.05;  // seconds, after which it looks whether a rank has died

  void* const memory_;
  const int rank_;
  const std::vector<int> names_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::thread thread_;  // moves what cannot be moved at once; started when it is first needed
  bool closed_ = false, slept_in_vain_ = false;
  std::vector<std::deque<Ref<Message>>> outgoing_;  // per rank
  std::vector<Incoming> incoming_;                  // per rank
  std::list<Ref<Message>> receives_;                // in the order of the calls
  std::list<Kept> kept_;
  std::vector<char> broken_;  // per rank: whether a message to it ended in the middle
  std::vector<Ref<Message>> done_;  // ended, to be completed without the lock
};

}  // namespace
