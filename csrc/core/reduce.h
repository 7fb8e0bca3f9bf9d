// Sums whose result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/buffer.h"
#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

// Four accumulators, one per quarter: a single one would wait for its own addition at every step.
inline float sum(const float* values, int64_t count) {
  const int64_t quarter = count / 4;
  const float *v0 = values, *v1 = v0 + quarter, *v2 = v1 + quarter, *v3 = v2 + quarter;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < quarter; ++i) {
    s0 += v0[i];
    s1 += v1[i];
    s2 += v2[i];
    s3 += v3[i];
  }
  for (int64_t i = 4 * quarter; i < count; ++i) s0 += values[i];
  return (s0 + s1) + (s2 + s3);
}

// The sum of (value - centre)^2.
inline float sum_of_squares(const float* values, int64_t count, float centre) {
  const int64_t quarter = count / 4;
  const float *v0 = values, *v1 = v0 + quarter, *v2 = v1 + quarter, *v3 = v2 + quarter;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < quarter; ++i) {
    const float d0 = v0[i] - centre, d1 = v1[i] - centre, d2 = v2[i] - centre, d3 = v3[i] - centre;
    s0 += d0 * d0;
    s1 += d1 * d1;
    s2 += d2 * d2;
    s3 += d3 * d3;
  }
  for (int64_t i = 4 * quarter; i < count; ++i) s0 += (values[i] - centre) * (values[i] - centre);
  return (s0 + s1) + (s2 + s3);
}

// Column sums over rows, for gradients of parameters. The rows are cut into blocks by their number alone; each block is
// summed by one thread into its own partial row, and the partial rows are added in order.
class ColumnSums {
 public:
  ColumnSums(int64_t rows, int64_t columns, int kinds)
      : size(std::max<int64_t>(8, (rows + 63) / 64)),
        count(rows > 0 ? (rows + size - 1) / size : 0),
        columns_(columns),
        kinds_(kinds),
        partial_(count * columns * kinds) {}

  // The zeroed partial row of sum number `kind` in `block`. Call once per block and kind.
  float* start(int64_t block, int kind) const {
    float* row = at(block, kind);
    std::fill(row, row + columns_, 0.0f);
    return row;
  }

  // Adds the blocks up into `result`, of storage type `dtype`; nothing if there is no result.
  void finish(int kind, void* result, int dtype, int threads) const {
    if (!result) return;
    for_dtype(dtype, [&](auto* tag) {
      auto* to = static_cast<std::remove_pointer_t<decltype(tag)>*>(result);
      const int64_t tiles = (columns_ + kTile - 1) / kTile;
      parallel_ranges(tiles, threads_for(count * columns_, threads), [&](int64_t begin, int64_t end) {
        alignas(64) float total[kTile];
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t first = tile * kTile, width = std::min(kTile, columns_ - first);
          std::fill(total, total + kTile, 0.0f);
          for (int64_t block = 0; block < count; ++block) {
            const float* from = at(block, kind) + first;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) total[i] += from[i];
          }
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) store(to + first + i, total[i]);
        }
      });
    });
  }

  const int64_t size;   // rows per block
  const int64_t count;  // blocks

 private:
  static constexpr int64_t kTile = 64;
  float* at(int64_t block, int kind) const { return partial_.get() + (block * kinds_ + kind) * columns_; }
  int64_t columns_;
  int kinds_;
  Buffer<float> partial_;
};

}  // namespace stoker
