// The ranks of one host as a group: waiting for each other, and the collectives.
//
// Every collective is cut into pieces that fit the cache. Piece p of every rank lies in its slot p % kSlots; three counters
// per rank say how far it has copied in, reduced, and taken out. A rank waits only for the counter it needs, spinning
// briefly (another core is about to be done) and then sleeping on a futex (the other rank has no core at the moment).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/segment.h"

namespace stoker::comm {

enum Kind : int { kAllreduce, kReduce, kReduceScatter, kAllgather, kBroadcast, kGather, kScatter, kAlltoall, kBarrier };

// Which kind of store is faster on the way to the other ranks, in the middle of a long operation: some pieces go with plain
// stores, some past the cache, in turns, and whichever took less time carries the rest. The whole rhythm is timed and not the
// store alone, for what a store saves the reader may pay.
class Trial {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kBlock = 8, kSettling = 3, kBlocks = 6, kLeast = 96, kUntilNext = 512;

  bool due(std::int64_t pieces) {
    since_ += pieces;
    if (pieces < kLeast || since_ < kUntilNext) return false;
    since_ = 0;
    return true;
  }
  // Before piece k of the operation on trial; true if pieces go past the cache from here on.
  bool streaming(std::int64_t k);

 private:
  std::int64_t since_ = kUntilNext;
  double best_[2] = {};
  Clock::time_point start_;
};

class Group {
 public:
  Group(Segment segment, int rank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Segment& segment() { return segment_; }
  bool complete() const;  // all ranks are attached
  void set_timeout(double seconds);
  void set_names(const std::int64_t* ranks) { names_.assign(ranks, ranks + ranks_); }  // how errors call the ranks
  void abort(const std::string& why);
  std::string last_error;
  double waited() const { return waited_; }  // seconds spent waiting, all operations together
  const double* waited_for() const { return waited_for_.data(); }

  // root < 0: all ranks get the result.
  void allreduce(void* data, std::int64_t count, int type, int op, int root);
  void reduce_scatter(const void* const* from, void* to, const std::int64_t* counts, int type, int op);
  void allgather(const void* from, void* const* to, const std::int64_t* bytes);
  void broadcast(void* data, std::int64_t bytes, int root);
  void gather(const void* from, void* const* to, std::int64_t bytes, int root);
  void scatter(const void* const* from, void* to, std::int64_t bytes, int root);
  void alltoall(const void* const* from, const std::int64_t* sent, void* const* to, const std::int64_t* received);
  void barrier();

 private:
  using Clock = std::chrono::steady_clock;

  void begin(int kind, int type, int op, int root, std::int64_t count);
  void check_root(int root) const;
  std::int64_t agree_on_lengths(const std::int64_t* sent, const std::int64_t* received);
  void allreduce_small(void* data, std::int64_t count, int type, int op, int root);
  void publish(Counter& counter, std::uint32_t value);
  void put(void* to, const void* from, std::int64_t bytes);  // into a slot, cached or past the cache, as measures faster
  void claim(std::uint32_t piece);  // my slot for `piece` may be written
  void copied(std::uint32_t piece) { publish(mine().copied, piece + 1); }
  void reduced(std::uint32_t piece) { publish(mine().reduced, piece + 1); }
  void taken(std::uint32_t piece) { publish(mine().taken, piece + 1); }
  void await_copied(int rank, std::uint32_t piece);
  void await(int rank, Counter& counter, std::uint32_t target);
  void sleep_for(int rank, Counter& counter, std::uint32_t target);
  void check_others(int rank, Clock::time_point since);
  void check_signature(int rank);
  [[noreturn]] void give_up(int code, const std::string& why);
  std::string name(int rank) const;
  std::string describe(const Signature& signature) const;
  RankBlock& mine() { return segment_.block(rank_); }
  char* slot(int rank, std::uint32_t piece) const { return segment_.slot(rank, piece); }

  Segment segment_;
  int rank_, ranks_;
  std::int64_t slot_bytes_;
  std::uint32_t piece_ = 0;  // the next piece; all ranks count alike
  std::uint64_t sequence_ = 0;
  Signature now_{};
  std::vector<char> checked_;  // per rank: signature compared in this operation
  std::vector<std::int64_t> names_;
  std::vector<std::uint64_t> verified_;  // per rank: up to which operation its signatures were compared
  std::vector<double> waited_for_;
  double waited_ = 0.0;
  Trial trial_;
  bool streaming_ = false;
  int spin_;
  bool spin_useful_;
  Clock::duration timeout_;
};

}  // namespace stoker::comm
