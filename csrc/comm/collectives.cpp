// The collectives over a group's slots. All follow the same protocol: claim a slot, copy into it and publish; wait for the
// others' copies and read them; publish that they have been read.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/group.h"
#include "comm/rank_reduction.h"

namespace stoker::comm {
namespace {

constexpr std::int64_t kSmall = 32 << 10;  // up to here every rank reduces everything: one wait instead of two

constexpr std::int64_t kBlockBytes = 16 << 10;

std::int64_t pieces_of(std::int64_t total, std::int64_t each) { return std::max<std::int64_t>(1, (total + each - 1) / each); }

// Where share `index` of `shares` begins in a piece of `count` elements; on cache lines, whatever the type.
std::int64_t cut(std::int64_t count, int index, int shares) {
  return index == shares ? count : count * index / shares / 64 * 64;
}

void copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// How many bytes of a message of `total` lie in the piece of `each` bytes at `offset`.
std::int64_t part(std::int64_t total, std::int64_t offset, std::int64_t each) {
  return std::clamp<std::int64_t>(total - offset, 0, each);
}

char* at_offset(void* data, std::int64_t offset) { return static_cast<char*>(data) + offset; }
const char* at_offset(const void* data, std::int64_t offset) { return static_cast<const char*>(data) + offset; }

}  // namespace

void Group::allreduce_small(void* data, std::int64_t count, int type, int op, int root) {
  const std::uint32_t piece = piece_++;
  claim(piece);
  copy(slot(rank_, piece), data, count * size_of(type));
  copied(piece);
  if (root < 0 || root == rank_) {
    const void* sources[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      await_copied(rank, piece);
      sources[rank] = slot(rank, piece);
    }
    reduce(type, op, sources, ranks_, data, count);
  }
  taken(piece);
}

void Group::allreduce(void* data, std::int64_t count, int type, int op, int root) {
  if (root >= 0) check_root(root);
  begin(root < 0 ? "allreduce" : "reduce", type, op, root, count);
  const std::int64_t size = size_of(type);
  if (count * size <= std::min(kSmall, slot_bytes_)) return allreduce_small(data, count, type, op, root);

  const std::int64_t each = slot_bytes_ / size;
  const std::int64_t pieces = pieces_of(count, each);
  const bool receives = root < 0 || root == rank_;
  const std::uint32_t first = piece_;
  char* bytes = static_cast<char*>(data);
  const auto length = [&](std::int64_t k) { return std::min(each, count - k * each); };
  const auto element = [&](std::int64_t k, std::int64_t at) { return bytes + (k * each + at) * size; };

  // Each rank reduces one share of every piece, from its own data and the others' slots. It writes the result to its own slot, at
  // the offset of that share, to which nothing else is written.
  const auto copy_in = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    claim(piece);
    const std::int64_t n = length(k), from = cut(n, rank_, ranks_), to = cut(n, rank_ + 1, ranks_);
    put(slot(rank_, piece), element(k, 0), from * size);
    put(slot(rank_, piece) + to * size, element(k, to), (n - to) * size);
    copied(piece);
  };
  const auto reduce_share = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    const std::int64_t n = length(k), from = cut(n, rank_, ranks_), to = cut(n, rank_ + 1, ranks_);
    const void* sources[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != rank_) await_copied(rank, piece);
      sources[rank] = rank == rank_ ? element(k, from) : slot(rank, piece) + from * size;
    }
    char* result = slot(rank_, piece) + from * size;
    if (!receives) {
      reduce(type, op, sources, ranks_, result, to - from);
    } else {
      // In blocks, so that the copy for the others reads what the first-level cache still holds.
      const std::int64_t block = kBlockBytes / size;
      for (std::int64_t at = from; at < to; at += block) {
        const std::int64_t some = std::min(block, to - at);
        reduce(type, op, sources, ranks_, element(k, at), some);
        put(result, element(k, at), some * size);
        result += some * size;
        for (int rank = 0; rank < ranks_; ++rank) sources[rank] = at_offset(sources[rank], some * size);
      }
    }
    reduced(piece);
  };
  const auto copy_out = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    const std::int64_t n = length(k);
    for (int step = 1; step < ranks_ && receives; ++step) {
      const int rank = (rank_ + step) % ranks_;
      await(rank, segment_.block(rank).reduced, piece + 1);
      const std::int64_t from = cut(n, rank, ranks_), to = cut(n, rank + 1, ranks_);
      copy(element(k, from), slot(rank, piece) + from * size, (to - from) * size);
    }
    taken(piece);
  };
  const bool trying = trial_.due(pieces);
  for (std::int64_t k = 0; k < pieces + 2; ++k) {
    if (trying && k <= Trial::kBlock * Trial::kBlocks) streaming_ = trial_.streaming(k);
    if (k < pieces) copy_in(k);
    if (k >= 1 && k - 1 < pieces) reduce_share(k - 1);
    if (k >= 2) copy_out(k - 2);
  }
  piece_ = first + static_cast<std::uint32_t>(pieces);
}

void Group::reduce_scatter(const void* const* from, void* to, const std::int64_t* counts, int type, int op) {
  begin("reduce_scatter", type, op, -1, std::accumulate(counts, counts + ranks_, std::int64_t{0}));
  const std::int64_t size = size_of(type);
  const std::int64_t each = slot_bytes_ / ranks_ / size / 8 * 8;
  const std::int64_t pieces = pieces_of(*std::max_element(counts, counts + ranks_), each);
  const std::uint32_t first = piece_;
  const auto copy_in = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    claim(piece);
    for (int rank = 0; rank < ranks_; ++rank)
      if (rank != rank_)
        put(slot(rank_, piece) + rank * each * size, at_offset(from[rank], k * each * size),
            part(counts[rank], k * each, each) * size);
    copied(piece);
  };
  const auto reduce_share = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    const void* sources[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != rank_) await_copied(rank, piece);
      sources[rank] = rank == rank_ ? at_offset(from[rank], k * each * size) : slot(rank, piece) + rank_ * each * size;
    }
    reduce(type, op, sources, ranks_, at_offset(to, k * each * size), part(counts[rank_], k * each, each));
    taken(piece);
  };
  for (std::int64_t k = 0; k < pieces + 1; ++k) {
    if (k < pieces) copy_in(k);
    if (k >= 1) reduce_share(k - 1);
  }
  piece_ = first + static_cast<std::uint32_t>(pieces);
}

// Calls body(piece, offset) for every piece of `each` bytes in a message of `bytes`; an empty message has one empty piece.
template <typename F>
void Group::for_each_piece(std::int64_t bytes, std::int64_t each, F&& body) {
  const std::int64_t pieces = pieces_of(bytes, each);
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    body(piece, k * each);
    taken(piece);
  }
}

void Group::allgather(const void* from, void* const* to, const std::int64_t* bytes) {
  begin("allgather", -1, -1, -1, std::accumulate(bytes, bytes + ranks_, std::int64_t{0}));
  for_each_piece(*std::max_element(bytes, bytes + ranks_), slot_bytes_, [&](std::uint32_t piece, std::int64_t at) {
    claim(piece);
    put(slot(rank_, piece), at_offset(from, at), part(bytes[rank_], at, slot_bytes_));
    copied(piece);
    copy(at_offset(to[rank_], at), at_offset(from, at), part(bytes[rank_], at, slot_bytes_));
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      await_copied(rank, piece);
      copy(at_offset(to[rank], at), slot(rank, piece), part(bytes[rank], at, slot_bytes_));
    }
  });
}

void Group::broadcast(void* data, std::int64_t bytes, int root) {
  check_root(root);
  begin("broadcast", -1, -1, root, bytes);
  // Smaller pieces than elsewhere: the readers wait for the first one, and the writer for the readers of the last.
  const std::int64_t each = std::min<std::int64_t>(slot_bytes_, 128 << 10);
  for_each_piece(bytes, each, [&](std::uint32_t piece, std::int64_t at) {
    if (rank_ == root) {
      claim(piece);
      put(slot(root, piece), at_offset(data, at), part(bytes, at, each));
      copied(piece);
    } else {
      await_copied(root, piece);
      copy(at_offset(data, at), slot(root, piece), part(bytes, at, each));
    }
  });
}

void Group::gather(const void* from, void* const* to, std::int64_t bytes, int root) {
  check_root(root);
  begin("gather", -1, -1, root, bytes);
  for_each_piece(bytes, slot_bytes_, [&](std::uint32_t piece, std::int64_t at) {
    const std::int64_t n = part(bytes, at, slot_bytes_);
    if (rank_ != root) {
      claim(piece);
      put(slot(rank_, piece), at_offset(from, at), n);
      copied(piece);
      return;
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != root) await_copied(rank, piece);
      copy(at_offset(to[rank], at), rank == root ? at_offset(from, at) : slot(rank, piece), n);
    }
  });
}

void Group::scatter(const void* const* from, void* to, std::int64_t bytes, int root) {
  check_root(root);
  begin("scatter", -1, -1, root, bytes);
  const std::int64_t each = share_bytes();
  for_each_piece(bytes, each, [&](std::uint32_t piece, std::int64_t at) {
    const std::int64_t n = part(bytes, at, each);
    if (rank_ == root) {
      claim(piece);
      for (int rank = 0; rank < ranks_; ++rank)
        put(rank == root ? at_offset(to, at) : slot(root, piece) + rank * each, at_offset(from[rank], at), n);
      copied(piece);
    } else {
      await_copied(root, piece);
      copy(at_offset(to, at), slot(root, piece) + rank_ * each, n);
    }
  });
}

// Each rank knows only how much it sends and expects, so all exchange their lengths first. Returns the longest message.
std::int64_t Group::agree_on_lengths(const std::int64_t* sent, const std::int64_t* received) {
  const std::uint32_t piece = piece_++;
  claim(piece);
  copy(slot(rank_, piece), sent, ranks_ * static_cast<std::int64_t>(sizeof(std::int64_t)));
  copied(piece);
  std::int64_t longest = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    await_copied(rank, piece);
    const std::int64_t* theirs = reinterpret_cast<const std::int64_t*>(slot(rank, piece));
    longest = std::max(longest, *std::max_element(theirs, theirs + ranks_));
    if (theirs[rank_] != received[rank])
      give_up(STOKER_COMM_DISAGREE, "the ranks disagree on operation " + std::to_string(sequence_) + ", alltoall: " + name(rank) +
                             " sends " + std::to_string(theirs[rank_]) + " bytes to " + name(rank_) + ", which expects " +
                             std::to_string(received[rank]));
  }
  taken(piece);
  return longest;
}

void Group::alltoall(const void* const* from, const std::int64_t* sent, void* const* to, const std::int64_t* received) {
  begin("alltoall", -1, -1, -1, -1);
  const std::int64_t longest = agree_on_lengths(sent, received), each = share_bytes();
  for_each_piece(longest, each, [&](std::uint32_t piece, std::int64_t at) {
    claim(piece);
    for (int rank = 0; rank < ranks_; ++rank)
      put(rank == rank_ ? at_offset(to[rank], at) : slot(rank_, piece) + rank * each, at_offset(from[rank], at),
          part(sent[rank], at, each));
    copied(piece);
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      await_copied(rank, piece);
      copy(at_offset(to[rank], at), slot(rank, piece) + rank_ * each, part(received[rank], at, each));
    }
  });
}

void Group::barrier() {
  begin("barrier", -1, -1, -1, 0);
  const std::uint32_t piece = piece_++;
  copied(piece);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) await_copied(rank, piece);
  taken(piece);
}

}  // namespace stoker::comm
