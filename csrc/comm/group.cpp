// Waiting, failing and error messages: everything of a group but the collectives themselves.
#include "comm/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

#include "comm/rank_reduction.h"
#include "comm/stream.h"
#include "comm/waiting.h"

namespace stoker::comm {
namespace {

bool reached(std::uint32_t value, std::uint32_t target) { return static_cast<std::int32_t>(value - target) >= 0; }

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Group::Group(Segment segment, int rank)
    : segment_(std::move(segment)), rank_(rank), ranks_(static_cast<int>(segment_.header().ranks)),
      slot_bytes_(static_cast<std::int64_t>(segment_.header().slot_bytes)), checked_(ranks_, 0),
      verified_(ranks_, 0), reserved_(ranks_, 0), spin_(kLongestSpin), timeout_(std::chrono::minutes(30)) {
  if (rank < 0 || rank >= ranks_) throw Error(STOKER_COMM_ARGUMENT, "rank " + std::to_string(rank) + " is not in the segment");
  // A rank that is pinned to one core sees one usable core: then every rank has its own, and spinning is right.
  const int cores = usable_cores();
  spin_useful_ = cores == 1 ? sysconf(_SC_NPROCESSORS_ONLN) >= ranks_ : cores >= ranks_;
  for (int i = 0; i < ranks_; ++i) names_.push_back(i);
  segment_.reserve_slots(rank);
  RankBlock& block = own_block();
  block.pid = getpid();
  block.started = process_start(getpid());
  block.pids = pid_namespace();
  std::uint32_t absent = 0;
  if (!block.state.compare_exchange_strong(absent, 1))
    throw Error(STOKER_COMM_ARGUMENT, "rank " + std::to_string(rank) + " is attached already");
}

Group::~Group() {
  if (own_block().pid == getpid()) own_block().state = 2;  // a child of fork() has a copy of this object, but is not the rank
}

int Group::await_all(double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  int tries = 0;
  for (int rank = 0; rank < ranks_;) {
    if (segment_.block(rank).state.load(std::memory_order_acquire)) {
      ++rank;
    } else {
      if (Clock::now() > deadline) return rank;
      usleep(++tries < 20 ? 50 : 500);
    }
  }
  return -1;
}

void Group::set_timeout(double seconds) {
  timeout_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)));
}

std::string Group::name(int rank) const { return "rank " + std::to_string(names_[rank]); }

std::string Group::describe(const Signature& signature) const {
  std::string text = signature.operation;
  if (text == "barrier") return text;
  if (signature.op >= 0) text += std::string(" ") + op_name(signature.op);
  if (signature.count >= 0) text += " of " + std::to_string(signature.count) + " " + type_name(signature.dtype);
  if (signature.root >= 0) text += " with root " + name(signature.root);
  return text;
}

void Group::give_up(int code, const std::string& why) {
  Header& header = segment_.header();
  std::uint32_t none = 0;
  if (header.failed.compare_exchange_strong(none, static_cast<std::uint32_t>(rank_) + 1)) {
    std::snprintf(header.failure, sizeof(header.failure), "%s", why.c_str());
    header.failure_written = 1;
  }
  throw Error(code, why);
}

void Group::abort(const std::string& why) {
  try {
    give_up(STOKER_COMM_ABORTED, why);
  } catch (const Error&) {
  }
}

void Group::begin(const char* operation, int type, int op, int root, std::int64_t count) {
  Header& header = segment_.header();
  if (header.failed.load(std::memory_order_relaxed))
    throw Error(STOKER_COMM_ABORTED, "the group has failed before: " + std::string(header.failure_written ? header.failure : "unknown"));
  current_ = Signature{++sequence_, {}, type, op, root, count};
  std::snprintf(current_.operation, sizeof(current_.operation), "%s", operation);
  own_block().signatures[sequence_ % kRing] = current_;
  own_block().sequence.store(sequence_, std::memory_order_release);
  // All pieces before this operation are done, also those that this rank did not have to copy in or to reduce. A counter that
  // stayed 2^31 pieces behind the others would seem to be ahead of them. Nobody sleeps on the values stored here: a rank that
  // waits for this one waits for a piece that this rank publishes itself.
  own_block().copied.value.store(piece_, std::memory_order_release);
  own_block().reduced.value.store(piece_, std::memory_order_release);
  std::fill(checked_.begin(), checked_.end(), 0);
  checked_[rank_] = 1;
}

void Group::check_root(int root) const {
  if (root >= 0 && root < ranks_) return;
  throw Error(STOKER_COMM_ARGUMENT, "there is no rank " + std::to_string(root) + " to be the root in a group of " + std::to_string(ranks_));
}

void Group::publish(Counter& counter, std::uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst)) futex(&counter.value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Trial::streaming(std::int64_t k) {
  const std::int64_t block = k / kBlock, at = k % kBlock;
  if (k == 0) best_[0] = best_[1] = 1e9;
  if (at == kSettling) start_ = Clock::now();
  if (at == 0 && block > 0 && block <= kBlocks) {
    double& best = best_[(block - 1) & 1];
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start_).count());
  }
  return block < kBlocks ? block & 1 : best_[1] < best_[0];
}

void Group::put(void* to, const void* from, std::int64_t bytes) {
  constexpr std::int64_t kSmall = 4 << 10;
  if (bytes <= 0 || to == from) return;
  if (streaming_ && bytes >= kSmall)
    stream(to, from, bytes);
  else
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void Group::claim(std::uint32_t piece) {
  // A rank that has published piece - kSlots as taken does not read this slot again.
  for (int rank = 0; rank < ranks_; ++rank) await(rank, segment_.block(rank).taken, piece - kSlots + 1);
}

void Group::await_copied(int rank, std::uint32_t piece) {
  await(rank, segment_.block(rank).copied, piece + 1);
  if (!checked_[rank]) check_signature(rank);
}

void Group::await(int rank, Counter& counter, std::uint32_t target) {
  if (reached(counter.value.load(std::memory_order_acquire), target)) return;
  bool seen = false;
  for (int i = spin_useful_ ? spin_ : 0; i > 0 && !seen; --i) {
    pause();
    seen = reached(counter.value.load(std::memory_order_acquire), target);
  }
  // If spinning did not help, the other rank probably has no core: spin less, so that it can have this one.
  spin_ = seen ? std::min(spin_ * 2, kLongestSpin) : std::max(spin_ / 2, kShortestSpin);
  if (!seen) sleep_for(rank, counter, target);
}

void Group::sleep_for(int rank, Counter& counter, std::uint32_t target) {
  const auto start = Clock::now();
  long slice_us = 2000;
  for (;;) {
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t value = counter.value.load(std::memory_order_seq_cst);
    long outcome = 0;
    if (!reached(value, target)) outcome = futex_wait(counter.value, value, slice_us);
    counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (reached(counter.value.load(std::memory_order_acquire), target)) return;
    if (!outcome) continue;
    const Header& header = segment_.header();
    const RankBlock& block = segment_.block(rank);
    const bool failed = header.failed.load() && header.failure_written.load();
    const bool left = block.state.load() == 2;
    const bool died = has_died(block, own_block());
    // Look once more: a rank that has failed, left or died may have published the piece just before.
    if (reached(counter.value.load(std::memory_order_acquire), target)) return;
    if (failed) throw Error(STOKER_COMM_ABORTED, name(static_cast<int>(header.failed.load()) - 1) + " gave up: " + header.failure);
    check_others(rank, start);
    const std::string operation = describe(current_) + " (operation " + std::to_string(sequence_) + ")";
    if (left) give_up(STOKER_COMM_DEAD, name(rank) + " has left the group while " + name(rank_) + " waits for it in " + operation);
    if (died)
      give_up(STOKER_COMM_DEAD, name(rank) + " (pid " + std::to_string(block.pid) + ") has died; " + name(rank_) + " was in " + operation);
    slice_us = std::min(slice_us * 2, 50000L);  // so a dead rank is noticed within 50 ms
  }
}

void Group::check_others(int rank, Clock::time_point since) {
  const std::string operation = describe(current_) + " (operation " + std::to_string(sequence_) + ")";
  for (int other = 0; other < ranks_; ++other) {
    const RankBlock& block = segment_.block(other);
    if (other != rank && has_died(block, own_block()))
      give_up(STOKER_COMM_DEAD, name(other) + " (pid " + std::to_string(block.pid) + ") has died; " + name(rank_) + " was in " + operation);
  }
  if (!checked_[rank] && segment_.block(rank).sequence.load(std::memory_order_acquire) == sequence_) check_signature(rank);
  if (Clock::now() - since < timeout_) return;
  std::string missing;
  for (int other = 0; other < ranks_; ++other) {
    const RankBlock& block = segment_.block(other);
    const std::uint64_t at = block.sequence.load(std::memory_order_acquire);
    if (other != rank && at >= sequence_) continue;
    missing += (missing.empty() ? "" : ", ") + name(other);
    if (at == 0)
      missing += " (has not started any operation)";
    else
      missing += " (pid " + std::to_string(block.pid) + ", " + (at < sequence_ ? "last" : "now") + " in operation " +
                 std::to_string(at) + ", " + describe(block.signatures[at % kRing]) + ")";
  }
  const double seconds = std::chrono::duration<double>(timeout_).count();
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%.3g", seconds);
  give_up(STOKER_COMM_TIMEOUT, "timeout while " + name(rank_) + " waited " + waited + " s in " + operation + " for " + missing);
}

void Group::check_signature(int rank) {
  checked_[rank] = 1;
  // Compares all operations since the last comparison: two ranks that both are the root of a broadcast do not wait for each
  // other in it. No rank is more than kSlots operations ahead, so half of the ring has not been overwritten.
  const std::uint64_t oldest = sequence_ > kRing / 2 ? sequence_ - kRing / 2 : 1;
  for (std::uint64_t at = std::max(verified_[rank] + 1, oldest); at <= sequence_; ++at) {
    const Signature& ours = own_block().signatures[at % kRing];
    const Signature& theirs = segment_.block(rank).signatures[at % kRing];
    if (std::memcmp(&theirs, &ours, sizeof(ours)) == 0)
      continue;
    give_up(STOKER_COMM_DISAGREE, "the ranks disagree on operation " + std::to_string(at) + ": " + name(rank_) + " is in " +
                           describe(ours) + ", " + name(rank) + " in " +
                           (theirs.sequence == ours.sequence ? describe(theirs) : std::string("another one")));
  }
  verified_[rank] = sequence_;
}

}  // namespace stoker::comm
