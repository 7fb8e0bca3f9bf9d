// Pipes between two ranks: a ring of bytes with one writer and one reader. What the bytes mean is left to the caller.
#include <algorithm>
#include <climits>
#include <cstring>

#include "comm/group.h"
#include "comm/waiting.h"

namespace stoker::comm {
namespace {

constexpr std::uint64_t kPiece = 64 << 10;  // bytes published at once, so that the reader copies one piece while the next is written

// Calls body(offset, bytes) for the parts of a ring of `room` bytes that begin at `position`.
template <typename F>
void for_each_part(std::uint64_t position, std::uint64_t bytes, std::uint64_t room, F&& body) {
  const std::uint64_t at = position % room, first = std::min(bytes, room - at);
  body(at, std::uint64_t{0}, first);
  if (bytes > first) body(0, first, bytes - first);
}

}  // namespace

std::int64_t Group::write(int to, const void* from, std::int64_t bytes) {
  if (!reserved_[to]) {
    try {
      segment_.reserve_pipe(rank_, to);
    } catch (const Error& error) {
      give_up(error.code, error.what());  // else the receiver would wait until its time-out
    }
  }
  reserved_[to] = 1;
  Pipe& pipe = segment_.pipe(rank_, to);
  const std::uint64_t room = segment_.header().pipe_bytes - sizeof(Pipe);
  const std::uint64_t start = pipe.written.load(std::memory_order_relaxed);
  const std::uint64_t end = start + std::min<std::uint64_t>(bytes, room - (start - pipe.read.load(std::memory_order_acquire)));
  const char* source = static_cast<const char*>(from);
  for (std::uint64_t at = start; at < end;) {
    const std::uint64_t some = std::min(kPiece, end - at);
    for_each_part(at, some, room, [&](std::uint64_t offset, std::uint64_t done, std::uint64_t n) {
      std::memcpy(pipe.data() + offset, source + (at - start) + done, n);
    });
    at += some;
    pipe.written.store(at, std::memory_order_release);
    ring(to);
  }
  return static_cast<std::int64_t>(end - start);
}

std::int64_t Group::read(int from, void* to, std::int64_t bytes) {
  Pipe& pipe = segment_.pipe(from, rank_);
  const std::uint64_t room = segment_.header().pipe_bytes - sizeof(Pipe);
  const std::uint64_t start = pipe.read.load(std::memory_order_relaxed);
  const std::uint64_t some = std::min<std::uint64_t>(bytes, pipe.written.load(std::memory_order_acquire) - start);
  if (!some) return 0;
  for_each_part(start, some, room, [&](std::uint64_t offset, std::uint64_t done, std::uint64_t n) {
    std::memcpy(static_cast<char*>(to) + done, pipe.data() + offset, n);
  });
  pipe.read.store(start + some, std::memory_order_release);
  ring(from);
  return static_cast<std::int64_t>(some);
}

void Group::ring(int rank) {
  Counter& bell = segment_.block(rank).bell;
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst)) futex(&bell.value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Group::sleep(std::uint32_t seen, double seconds) {
  Counter& bell = own_block().bell;
  for (int i = spin_useful_ ? kShortestSpin * 16 : 0; i > 0; --i) {
    if (bell.value.load(std::memory_order_acquire) != seen) return true;
    pause();
  }
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(bell.value, seen, static_cast<long>(seconds * 1e6));
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return bell.value.load(std::memory_order_acquire) != seen;
}

const char* Group::gone(int rank) {
  const RankBlock& block = segment_.block(rank);
  const Header& header = segment_.header();
  if (header.failed.load() == static_cast<std::uint32_t>(rank) + 1 && header.failure_written.load()) {
    if (gave_up_.empty()) gave_up_ = std::string("gave up: ") + header.failure;
    return gave_up_.c_str();
  }
  if (block.state.load() == 2) return "has left the group";
  return has_died(block, own_block()) ? "has died" : nullptr;
}

}  // namespace stoker::comm
