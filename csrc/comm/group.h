// The ranks of one host as a group: waiting for each other, and the collectives.
//
// Every collective is divided into pieces that fit the cache. Piece p of every rank is in its slot p % kSlots; three counters
// per rank say how many pieces it has copied in, reduced, and read. A rank waits only for the counter it needs, spinning
// briefly (another core is about to be done) and then sleeping on a futex (the other rank has no core at the moment).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/segment.h"

namespace stoker::comm {

// Finds out during a long operation which kind of store is faster: some pieces are written with plain stores and some past the
// cache, in turns, and whichever took less time is used for the rest. The whole loop is timed and not the store alone, because
// what the writer saves the reader may lose.
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
  // Called before piece k of the operation on trial; true if pieces are written past the cache from now on.
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
  int await_all(double seconds);  // the first rank that is not attached within that time, or -1
  void set_timeout(double seconds);
  void set_names(const std::int64_t* ranks) { names_.assign(ranks, ranks + ranks_); }  // the ranks' numbers in error messages
  void abort(const std::string& why);
  std::string last_error;

  // root < 0: all ranks get the result.
  void allreduce(void* data, std::int64_t count, int type, int op, int root);
  void reduce_scatter(const void* const* from, void* to, const std::int64_t* counts, int type, int op);
  void allgather(const void* from, void* const* to, const std::int64_t* bytes);
  void broadcast(void* data, std::int64_t bytes, int root);
  void gather(const void* from, void* const* to, std::int64_t bytes, int root);
  void scatter(const void* const* from, void* to, std::int64_t bytes, int root);
  void alltoall(const void* const* from, const std::int64_t* sent, void* const* to, const std::int64_t* received);
  void barrier();

  // Pipes (pipe.cpp): a stream of bytes from every rank to every other. No call waits; one thread at a time per pipe and end.
  std::int64_t write(int to, const void* from, std::int64_t bytes);  // how many bytes were accepted
  std::int64_t read(int from, void* to, std::int64_t bytes);         // how many bytes were there
  std::uint32_t bell() { return own_block().bell.value.load(std::memory_order_seq_cst); }
  void ring() { ring(rank_); }  // ends a sleep of this rank
  bool sleep(std::uint32_t seen, double seconds);  // until the bell differs from `seen`; false: it did not within `seconds`
  const char* gone(int rank);  // "has died", "has left the group", "gave up: why", or null

 private:
  using Clock = std::chrono::steady_clock;

  void begin(const char* operation, int type, int op, int root, std::int64_t count);
  template <typename F>
  void for_each_piece(std::int64_t bytes, std::int64_t each, F&& body);
  std::int64_t share_bytes() const { return slot_bytes_ / ranks_ / 64 * 64; }  // of a slot that is divided among the ranks
  void check_root(int root) const;
  std::int64_t agree_on_lengths(const std::int64_t* sent, const std::int64_t* received);
  void allreduce_small(void* data, std::int64_t count, int type, int op, int root);
  void publish(Counter& counter, std::uint32_t value);
  void ring(int rank);
  void put(void* to, const void* from, std::int64_t bytes);  // into a slot, with the kind of store that measured faster
  void claim(std::uint32_t piece);  // waits until this rank's slot for `piece` may be written
  void copied(std::uint32_t piece) { publish(own_block().copied, piece + 1); }
  void reduced(std::uint32_t piece) { publish(own_block().reduced, piece + 1); }
  void taken(std::uint32_t piece) { publish(own_block().taken, piece + 1); }
  void await_copied(int rank, std::uint32_t piece);
  void await(int rank, Counter& counter, std::uint32_t target);
  void sleep_for(int rank, Counter& counter, std::uint32_t target);
  void check_others(int rank, Clock::time_point since);
  void check_signature(int rank);
  [[noreturn]] void give_up(int code, const std::string& why);
  std::string name(int rank) const;
  std::string describe(const Signature& signature) const;
  RankBlock& own_block() { return segment_.block(rank_); }
  char* slot(int rank, std::uint32_t piece) const { return segment_.slot(rank, piece); }

  Segment segment_;
  int rank_, ranks_;
  std::int64_t slot_bytes_;
  std::uint32_t piece_ = 0;  // the next piece; the same number on all ranks
  std::uint64_t sequence_ = 0;
  Signature current_{};
  std::vector<char> checked_;  // per rank: signature compared in this operation
  std::vector<std::int64_t> names_;
  std::vector<std::uint64_t> verified_;  // per rank: up to which operation its signatures were compared
  std::vector<char> reserved_;  // per rank: whether the pipe to it has memory
  std::string gave_up_;         // what gone() returns for the rank that failed first
  Trial trial_;
  bool streaming_ = false;
  int spin_;
  bool spin_useful_;
  Clock::duration timeout_;
};

}  // namespace stoker::comm
