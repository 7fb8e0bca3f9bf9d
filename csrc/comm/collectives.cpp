// The collectives over a group's slots. All of them keep the same rhythm: claim a slot, copy in, publish; wait for the
// others' copies, read them; publish that they are read.
#include <algorithm>
#include <cstring>

#include "comm/group.h"
#include "comm/reduce.h"

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
  begin(root < 0 ? kAllreduce : kReduce, type, op, root, count);
  const std::int64_t size = size_of(type);
  if (count * size <= std::min(kSmall, slot_bytes_)) return allreduce_small(data, count, type, op, root);

  const std::int64_t each = slot_bytes_ / size;
  const std::int64_t pieces = pieces_of(count, each);
  const bool receives = root < 0 || root == rank_;
  const std::uint32_t first = piece_;
  char* bytes = static_cast<char*>(data);
  const auto length = [&](std::int64_t k) { return std::min(each, count - k * each); };
  const auto here = [&](std::int64_t k, std::int64_t at) { return bytes + (k * each + at) * size; };

  // Each rank reduces one share of every piece, from its own data and the others' slots; the result lies in the place of
  // that share in its own slot, which nobody else fills.
  const auto copy_in = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    claim(piece);
    const std::int64_t n = length(k), from = cut(n, rank_, ranks_), to = cut(n, rank_ + 1, ranks_);
    put(slot(rank_, piece), here(k, 0), from * size);
    put(slot(rank_, piece) + to * size, here(k, to), (n - to) * size);
    copied(piece);
  };
  const auto reduce_share = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    const std::int64_t n = length(k), from = cut(n, rank_, ranks_), to = cut(n, rank_ + 1, ranks_);
    const void* sources[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != rank_) await_copied(rank, piece);
      sources[rank] = rank == rank_ ? here(k, from) : slot(rank, piece) + from * size;
    }
    char* result = slot(rank_, piece) + from * size;
    if (!receives) {
      reduce(type, op, sources, ranks_, result, to - from);
    } else {
      // In blocks, so that the copy for the others reads what the first-level cache still holds.
      const std::int64_t block = kBlockBytes / size;
      for (std::int64_t at = from; at < to; at += block) {
        const std::int64_t some = std::min(block, to - at);
        reduce(type, op, sources, ranks_, here(k, at), some);
        put(result, here(k, at), some * size);
        result += some * size;
        for (int rank = 0; rank < ranks_; ++rank) sources[rank] = static_cast<const char*>(sources[rank]) + some * size;
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
      copy(here(k, from), slot(rank, piece) + from * size, (to - from) * size);
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
  std::int64_t longest = 0, total = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    longest = std::max(longest, counts[rank]);
    total += counts[rank];
  }
  begin(kReduceScatter, type, op, -1, total);
  const std::int64_t size = size_of(type);
  const std::int64_t each = slot_bytes_ / ranks_ / size / 8 * 8;
  const std::int64_t pieces = pieces_of(longest, each);
  const std::uint32_t first = piece_;
  const auto length = [&](int rank, std::int64_t k) { return std::clamp<std::int64_t>(counts[rank] - k * each, 0, each); };
  const auto copy_in = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    claim(piece);
    for (int rank = 0; rank < ranks_; ++rank)
      if (rank != rank_)
        put(slot(rank_, piece) + rank * each * size, static_cast<const char*>(from[rank]) + k * each * size,
            length(rank, k) * size);
    copied(piece);
  };
  const auto reduce_share = [&](std::int64_t k) {
    const std::uint32_t piece = first + static_cast<std::uint32_t>(k);
    const void* sources[kMostRanks];
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank != rank_) await_copied(rank, piece);
      sources[rank] = rank == rank_ ? static_cast<const char*>(from[rank]) + k * each * size
                                    : slot(rank, piece) + rank_ * each * size;
    }
    reduce(type, op, sources, ranks_, static_cast<char*>(to) + k * each * size, length(rank_, k));
    taken(piece);
  };
  for (std::int64_t k = 0; k < pieces + 1; ++k) {
    if (k < pieces) copy_in(k);
    if (k >= 1) reduce_share(k - 1);
  }
  piece_ = first + static_cast<std::uint32_t>(pieces);
}

void Group::allgather(const void* from, void* const* to, const std::int64_t* bytes) {
  std::int64_t longest = 0, total = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    longest = std::max(longest, bytes[rank]);
    total += bytes[rank];
  }
  begin(kAllgather, -1, -1, -1, total);
  const std::int64_t pieces = pieces_of(longest, slot_bytes_);
  const auto length = [&](int rank, std::int64_t at) { return std::clamp<std::int64_t>(bytes[rank] - at, 0, slot_bytes_); };
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    const std::int64_t at = k * slot_bytes_;
    claim(piece);
    put(slot(rank_, piece), static_cast<const char*>(from) + at, length(rank_, at));
    copied(piece);
    copy(static_cast<char*>(to[rank_]) + at, static_cast<const char*>(from) + at, length(rank_, at));
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      await_copied(rank, piece);
      copy(static_cast<char*>(to[rank]) + at, slot(rank, piece), length(rank, at));
    }
    taken(piece);
  }
}

void Group::broadcast(void* data, std::int64_t bytes, int root) {
  check_root(root);
  begin(kBroadcast, -1, -1, root, bytes);
  // Smaller pieces than elsewhere: the readers wait for the first one, and the writer for the readers of the last.
  const std::int64_t each = std::min<std::int64_t>(slot_bytes_, 128 << 10);
  const std::int64_t pieces = pieces_of(bytes, each);
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    const std::int64_t at = k * each, n = std::min(each, bytes - at);
    if (rank_ == root) {
      claim(piece);
      put(slot(root, piece), static_cast<char*>(data) + at, n);
      copied(piece);
    } else {
      await_copied(root, piece);
      copy(static_cast<char*>(data) + at, slot(root, piece), n);
    }
    taken(piece);
  }
}

void Group::gather(const void* from, void* const* to, std::int64_t bytes, int root) {
  check_root(root);
  begin(kGather, -1, -1, root, bytes);
  const std::int64_t pieces = pieces_of(bytes, slot_bytes_);
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    const std::int64_t at = k * slot_bytes_, n = std::min(slot_bytes_, bytes - at);
    if (rank_ != root) {
      claim(piece);
      put(slot(rank_, piece), static_cast<const char*>(from) + at, n);
      copied(piece);
    } else {
      for (int rank = 0; rank < ranks_; ++rank) {
        if (rank != root) await_copied(rank, piece);
        copy(static_cast<char*>(to[rank]) + at, rank == root ? static_cast<const char*>(from) + at : slot(rank, piece), n);
      }
    }
    taken(piece);
  }
}

void Group::scatter(const void* const* from, void* to, std::int64_t bytes, int root) {
  check_root(root);
  begin(kScatter, -1, -1, root, bytes);
  const std::int64_t each = slot_bytes_ / ranks_ / 64 * 64;
  const std::int64_t pieces = pieces_of(bytes, each);
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    const std::int64_t at = k * each, n = std::min(each, bytes - at);
    if (rank_ == root) {
      claim(piece);
      for (int rank = 0; rank < ranks_; ++rank)
        put(rank == root ? static_cast<char*>(to) + at : slot(root, piece) + rank * each,
            static_cast<const char*>(from[rank]) + at, n);
      copied(piece);
    } else {
      await_copied(root, piece);
      copy(static_cast<char*>(to) + at, slot(root, piece) + rank_ * each, n);
    }
    taken(piece);
  }
}

// A rank knows what it sends and expects itself, not what the others send it, nor how long they will be busy: all tell first.
// Returns the longest share of all.
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
  begin(kAlltoall, -1, -1, -1, -1);
  const std::int64_t longest = agree_on_lengths(sent, received);
  const std::int64_t each = slot_bytes_ / ranks_ / 64 * 64;
  const std::int64_t pieces = pieces_of(longest, each);
  for (std::int64_t k = 0; k < pieces; ++k) {
    const std::uint32_t piece = piece_++;
    const std::int64_t at = k * each;
    claim(piece);
    for (int rank = 0; rank < ranks_; ++rank)
      put(rank == rank_ ? static_cast<char*>(to[rank]) + at : slot(rank_, piece) + rank * each,
          static_cast<const char*>(from[rank]) + at, std::clamp<std::int64_t>(sent[rank] - at, 0, each));
    copied(piece);
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      await_copied(rank, piece);
      copy(static_cast<char*>(to[rank]) + at, slot(rank, piece) + rank_ * each,
           std::clamp<std::int64_t>(received[rank] - at, 0, each));
    }
    taken(piece);
  }
}

void Group::barrier() {
  begin(kBarrier, -1, -1, -1, 0);
  const std::uint32_t piece = piece_++;
  copied(piece);
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) await_copied(rank, piece);
  taken(piece);
}

}  // namespace stoker::comm
