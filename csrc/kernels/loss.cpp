// Softmax cross entropy over the last dimension:  loss = log(sum_j exp(l_j - m)) + m - l_label,  m = max_j l_j
//   dlogits = (softmax(l) - onehot(label)) * scale
// Rows whose label is `ignore` have loss 0 and gradient 0.
#include <cmath>
#include <limits>

#include "core/buffer.h"
#include "core/math.h"
#include "core/parallel.h"
#include "core/reduce.h"
#include "core/types.h"

namespace stoker {

template <typename Scalar>
static float row_maximum(const Scalar* row, int64_t columns) {
  float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < columns; ++i) {
    const float value = load(row[i]);
    highest = value > highest ? value : highest;
  }
  return highest;
}

constexpr int64_t kPiece = 512;

template <typename Scalar>
static double row_sum(const Scalar* row, int64_t columns, float highest) {
  alignas(64) float e[kPiece];
  double total = 0;
  for (int64_t first = 0; first < columns; first += kPiece) {
    const int64_t count = std::min(kPiece, columns - first);
    const Scalar* from = row + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) e[i] = exp_nonpositive(load(from[i]) - highest);
    total += sum(e, count);
  }
  return total;
}

// `to` may be `row` itself.
template <typename Scalar>
static void row_gradient(const Scalar* row, int64_t columns, int64_t label, float highest, float log_sum, float scale,
                         Scalar* to) {
  const float at_label = scale * (exp_nonpositive(load(row[label]) - highest - log_sum) - 1.0f);
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) store(to + i, scale * exp_nonpositive(load(row[i]) - highest - log_sum));
  store(to + label, at_label);
}

// The first row whose label is neither `ignore` nor a column, or -1.
static int64_t bad_label(const int64_t* labels, int64_t rows, int64_t columns, int64_t ignore) {
  for (int64_t row = 0; row < rows; ++row)
    if (labels[row] != ignore && (labels[row] < 0 || labels[row] >= columns)) return row;
  return -1;
}

}  // namespace stoker

STOKER_API int32_t stoker_cross_entropy_forward(stoker_cross_entropy_call* call) {
  using namespace stoker;
  const int64_t rows = call->rows, columns = call->columns, ignore = call->ignore;
  const int64_t* labels = call->labels;
  float *loss = call->loss, *stats = call->stats;
  call->bad_row = bad_label(labels, rows, columns, ignore);
  if (call->bad_row >= 0) return STOKER_BAD_INDEX;
  return guarded([&] {
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      const Scalar* from = static_cast<const Scalar*>(call->logits);
      parallel_ranges(rows, threads_for(rows * columns, call->threads), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (labels[row] == ignore) {
            loss[row] = stats[row] = stats[rows + row] = 0.0f;
            continue;
          }
          const Scalar* values = from + row * columns;
          const float highest = row_maximum(values, columns);
          const float log_sum = static_cast<float>(std::log(row_sum(values, columns, highest)));
          stats[row] = highest;
          stats[rows + row] = log_sum;
          loss[row] = log_sum + (highest - load(values[labels[row]]));
        }
      });
    });
    call->totals[0] = call->totals[1] = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
      if (labels[row] == ignore) continue;
      call->totals[0] += loss[row];
      call->totals[1] += 1.0;
    }
  });
}

STOKER_API int32_t stoker_cross_entropy_backward(const stoker_cross_entropy_call* call) {
  using namespace stoker;
  return guarded([&] {
    const int64_t rows = call->rows, columns = call->columns;
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      parallel_ranges(rows, threads_for(rows * columns, call->threads), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t label = call->labels[row];
          Scalar* to = static_cast<Scalar*>(call->dlogits) + row * columns;
          if (label == call->ignore) {
            std::fill(to, to + columns, Scalar{});
            continue;
          }
          row_gradient(static_cast<const Scalar*>(call->logits) + row * columns, columns, label, call->stats[row],
                       call->stats[rows + row], call->scales[row], to);
        }
      });
    });
  });
}

STOKER_API int32_t stoker_cross_entropy_block(float* logits, const int64_t* labels, const float* scales, float* loss,
                                              int64_t rows, int64_t columns, int32_t threads) {
  using namespace stoker;
  return guarded([&] {
    parallel_tasks(rows, threads_for(rows * columns, threads), [&](int64_t row) {
      float* values = logits + row * columns;
      const float highest = row_maximum(values, columns);
      const float log_sum = static_cast<float>(std::log(row_sum(values, columns, highest)));
      loss[row] = log_sum + (highest - values[labels[row]]);
      if (scales) row_gradient(values, columns, labels[row], highest, log_sum, scales[row], values);
    });
  });
}
