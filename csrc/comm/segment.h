// The memory that the ranks of one host share: a header, a block of counters per rank, and a ring of slots per rank.
//
// The segment is a memfd wherever the ranks can open each other's descriptors: it has no name, so nothing can be guessed
// and nothing is left behind, however a process ends, and it does not count against /dev/shm. Elsewhere it is a POSIX
// object of mode 0600 with 128 random bits in its name, unlinked as soon as all ranks are attached.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "stoker.h"

namespace stoker::comm {

constexpr std::uint64_t kMagic = 0x324d4d4f434b4f54ull;  // another one whenever the structures below change
constexpr int kRing = 16;      // signatures kept per rank; more than a rank can run ahead of another (kSlots)
constexpr int kSlots = 4;      // pieces in flight per rank: one read out, one reduced, one copied in, one to spare
constexpr int kMostRanks = 1024;

struct Error : std::runtime_error {
  Error(int code /* stoker_comm_code */, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;
};

// Counts pieces; others sleep on `value` when they have waited too long.
struct alignas(64) Counter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};

// What a rank believes it is doing. Ranks that disagree are named instead of mixing up each other's bytes.
struct Signature {
  std::uint64_t sequence;
  std::int32_t kind, dtype, op, root;
  std::int64_t count;
};

struct alignas(64) RankBlock {
  Counter copied;   // pieces laid into this rank's slots
  Counter reduced;  // pieces whose share of this rank is reduced
  Counter taken;    // pieces this rank will not read again
  std::atomic<std::uint64_t> sequence;  // the operation it is in, or was in last
  std::atomic<std::int64_t> pid;
  std::atomic<std::uint64_t> started;  // of the process, from /proc: a pid alone may be somebody else by now
  std::atomic<std::uint64_t> pids;     // the namespace that pid belongs to, 0 if unknown
  std::atomic<std::uint32_t> state;    // 0 not here yet, 1 attached, 2 left in good order
  Signature signatures[kRing];
};

struct alignas(64) Header {
  std::uint64_t magic, nonce;
  std::uint32_t ranks, slots;
  std::uint64_t slot_bytes, bytes;
  std::atomic<std::uint32_t> failed;  // 0, or 1 + the rank that gave up first
  std::atomic<std::uint32_t> failure_written;
  char failure[448];
};

class Segment {
 public:
  static Segment create(int ranks, std::int64_t slot_bytes, bool named);  // throws Error
  static Segment attach(const std::string& address);
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  Segment(const Segment&) = delete;
  ~Segment();

  const std::string& address() const { return address_; }
  Header& header() const { return *static_cast<Header*>(base_); }
  RankBlock& block(int rank) const;
  char* slot(int rank, std::uint32_t piece) const;
  void seal();  // all ranks are attached: the segment needs no name any more

 private:
  Segment() = default;
  void map(int descriptor, std::size_t bytes);
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  int descriptor_ = -1;
  std::string address_, name_;
};

// When the process `pid` started, in clock ticks since boot; 0 if there is no such process or it is a zombie.
std::uint64_t process_start(std::int64_t pid);

// The pid namespace of this process; 0 if /proc does not tell.
std::uint64_t pid_namespace();

}  // namespace stoker::comm
