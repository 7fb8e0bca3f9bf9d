// Sums whose result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

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

// Column sums over rows, for gradients of parameters. Rows are summed in parts, parts in blocks of kParts, and blocks in their
// order. Parts depend on the number of rows alone. A task is a block, or a part where that gives too few tasks for the threads; so
// the number of threads decides where the parts of a block are added up, not in which order.
class ColumnSums {
 public:
  // `kinds`: for each sum of its own, whether anybody wants it.
  ColumnSums(int64_t rows, int64_t columns, std::initializer_list<bool> kinds, int threads)
      : rows_(rows),
        columns_(columns),
        part_(std::max<int64_t>(8, (rows + kMostParts - 1) / kMostParts)),
        kinds_(static_cast<int>(kinds.size())),
        tasks_are_parts_(rows < kTasksPerThread * kParts * part_ * threads) {
    std::copy(kinds.begin(), kinds.end(), used_);
    count = rows > 0 ? (rows + task_rows() - 1) / task_rows() : 0;
    if (std::any_of(used_, used_ + kinds_, [](bool used) { return used; })) partial_ = Buffer<float>(count * columns * kinds_);
  }

  // f(begin, end, sums) for the rows of a task. It adds their shares to the zeroed rows sums[kind], which are null where nobody
  // wants that sum.
  template <typename F>
  void run(int64_t task, F&& f) const {
    const int64_t first = task * task_rows(), last = std::min(rows_, first + task_rows());
    Rows own{}, part{};
    for (int kind = 0; kind < kinds_; ++kind) {
      if (!used_[kind]) continue;
      own[kind] = at(task, kind);
      if (!tasks_are_parts_) part[kind] = thread_row<3>(kinds_ * columns_) + kind * columns_;
    }
    for (int64_t begin = first; begin < last; begin += part_) {
      const Rows& to = begin == first ? own : part;
      for_used([&](int kind) { std::fill(to[kind], to[kind] + columns_, 0.0f); });
      f(begin, std::min(last, begin + part_), to);
      if (begin != first) for_used([&](int kind) { add(own[kind], part[kind], columns_); });
    }
  }

  // A result of storage type `dtype`; null if there is none.
  struct Result {
    int kind;
    void* to;
    int dtype;
  };

  // Adds the blocks up.
  void finish(std::initializer_list<Result> results, int threads) const {
    const int64_t tiles = (columns_ + kTile - 1) / kTile, wanted = static_cast<int64_t>(results.size());
    if (std::none_of(results.begin(), results.end(), [](const Result& result) { return result.to; })) return;
    parallel_ranges(wanted * tiles, threads_for(count * columns_ * wanted, threads), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const Result& result = results.begin()[index / tiles];
        if (!result.to) continue;
        const int64_t first = index % tiles * kTile, width = std::min(kTile, columns_ - first);
        alignas(64) float total[kTile] = {};
        sum_blocks(result.kind, first, width, total);
        for_dtype(result.dtype, [&](auto* tag) {
          auto* to = static_cast<std::remove_pointer_t<decltype(tag)>*>(result.to) + first;
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) store(to + i, total[i]);
        });
      }
    });
  }

  int64_t count = 0;  // tasks

 private:
  static constexpr int kMostKinds = 3;
  static constexpr int64_t kTile = 64, kParts = 4, kMostParts = 256, kTasksPerThread = 3;
  using Rows = float* [kMostKinds];

  int64_t task_rows() const { return tasks_are_parts_ ? part_ : kParts * part_; }
  float* at(int64_t task, int kind) const { return partial_.get() + (task * kinds_ + kind) * columns_; }

  template <typename F>
  void for_used(F&& f) const {
    for (int kind = 0; kind < kinds_; ++kind)
      if (used_[kind]) f(kind);
  }

  static void add(float* to, const float* from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }

  void sum_blocks(int kind, int64_t first, int64_t width, float* total) const {
    if (!tasks_are_parts_) {
      for (int64_t block = 0; block < count; ++block) add(total, at(block, kind) + first, width);
      return;
    }
    alignas(64) float block[kTile];
    for (int64_t task = 0; task < count; task += kParts) {
      std::copy(at(task, kind) + first, at(task, kind) + first + width, block);
      for (int64_t part = task + 1; part < std::min(count, task + kParts); ++part) add(block, at(part, kind) + first, width);
      add(total, block, width);
    }
  }

  const int64_t rows_, columns_, part_;  // part_: rows
  const int kinds_;
  const bool tasks_are_parts_;
  bool used_[kMostKinds] = {};
  Buffer<float> partial_;
};

}  // namespace stoker
