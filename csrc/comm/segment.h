// The memory that the ranks of one host share: a header, a block of counters per rank, a ring of slots per rank for collectives,
// and a pipe from every rank to every other for messages. Pages take memory only once they are used.
//
// The segment is a memfd wherever the ranks can open each other's descriptors: it has no name, so it cannot be guessed, leaves
// nothing behind however a process ends, and does not count against /dev/shm. Elsewhere it is a POSIX shared memory object of
// mode 0600 with 128 random bits in its name, unlinked as soon as all ranks are attached. If a process is killed before that, the
// next one that creates such an object removes it: the name says who created it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "stoker.h"

namespace stoker::comm {

constexpr std::uint64_t kMagic = 0x344d4d4f434b4f54ull;  // changes whenever the structures below change
constexpr int kRing = 16;      // signatures kept per rank; more than a rank can run ahead of another (kSlots)
constexpr int kSlots = 4;      // pieces in flight per rank: one being read, one reduced, one copied in, one to spare
constexpr int kMostRanks = 1024;

struct Error : std::runtime_error {
  Error(int code /* stoker_comm_code */, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;
};

// Counts pieces; other ranks sleep on `value` when spinning has taken too long.
struct alignas(64) Counter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};

// The operation that a rank is in. Ranks in different operations fail with an error that names both.
struct Signature {
  std::uint64_t sequence;
  char operation[20];  // a multiple of 4 that leaves no padding, so that signatures can be compared as bytes
  std::int32_t dtype, op, root;
  std::int64_t count;
};
static_assert(sizeof(Signature) == 48);

struct alignas(64) RankBlock {
  Counter copied;   // pieces copied into this rank's slots
  Counter reduced;  // pieces of which this rank has reduced its share
  Counter taken;    // pieces this rank will not read again
  Counter bell;     // counts changes of the pipes of this rank
  std::atomic<std::uint64_t> sequence;  // the operation it is in, or was in last
  std::atomic<std::int64_t> pid;
  std::atomic<std::uint64_t> started;  // of the process, from /proc, because a pid may be reused
  std::atomic<std::uint64_t> pids;     // the namespace that pid belongs to, 0 if unknown
  std::atomic<std::uint32_t> state;    // 0 not attached yet, 1 attached, 2 left
  Signature signatures[kRing];
};

// Bytes on their way from one rank to another; `written` and `read` count them from the beginning. The data follows.
struct alignas(64) Pipe {
  std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  char* data() { return reinterpret_cast<char*>(this) + sizeof(Pipe); }
};

struct alignas(64) Header {
  std::uint64_t magic, nonce;
  std::uint32_t ranks, slots;
  std::uint64_t slot_bytes, pipe_bytes, bytes;
  std::atomic<std::uint32_t> failed;  // 0, or 1 + the rank that failed first
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
  Pipe& pipe(int from, int to) const;
  // Takes memory for the slots of `rank`, in a named segment; to be called by that rank. A page lies on the NUMA node of the process
  // that takes it, and only its own rank writes to a slot. In a memfd pages are taken when they are written. Throws Error.
  void reserve_slots(int rank);
  void reserve_pipe(int from, int to);  // throws Error if there is no memory for it, instead of a signal when it is written
  void seal();  // removes the name, once all ranks are attached

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

// The pid namespace of this process; 0 if unknown.
std::uint64_t pid_namespace();

}  // namespace stoker::comm
