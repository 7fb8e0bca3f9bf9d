// The blocks that attention works in, shared by its parts.
#pragma once

#include <cstdint>

#include "core/gemm.h"

namespace stoker {

constexpr int64_t kQueryBlock = 64;    // 64 x 512 scores: 128 KB, a quarter of a small L2
constexpr int64_t kKeyBlock = 512;
constexpr int64_t kQueryChunk = 512;   // queries per forward task
constexpr int64_t kKeyChunk = 2048;    // keys per backward task
constexpr int64_t kScoreStride = kKeyBlock + 16;  // not a power of two: rows would share cache sets

// Keys [begin, end) of a sequence.
struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

}  // namespace stoker
