// Softmax cross entropy over the last dimension:  loss = log(sum_j exp(l_j - m)) + m - l_label,  m = max_j l_j
//   dlogits = (softmax(l) - onehot(label)) * scale
// Rows whose label is `ignore` have loss 0 and gradient 0. A block, of a linear layer's logits, has more terms (stoker.h).
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

// The sum of f(l_j - highest) for l = scale * row.
template <typename Scalar, typename F>
static double row_sum(const Scalar* row, int64_t columns, float scale, float highest, F&& f) {
  alignas(64) float e[kPiece];
  double total = 0;
  for (int64_t first = 0; first < columns; first += kPiece) {
    const int64_t count = std::min(kPiece, columns - first);
    const Scalar* from = row + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) e[i] = f(scale * load(from[i]) - highest);
    total += sum(e, count);
  }
  return total;
}

template <typename Scalar>
static float row_log_sum(const Scalar* row, int64_t columns, float scale, float highest) {
  return static_cast<float>(std::log(row_sum(row, columns, scale, highest, [](float x) { return exp_nonpositive(x); })));
}

// The gradient of a row: (p_j * factor - share - [j = label] * hit) * by,  p_j = exp(scale * row_j - highest - log_sum); for a row
// of capped logits times the slope of the cap there, 1 - (row_j * per_cap)^2.
struct Gradient {
  float highest, log_sum, by;
  float scale = 1.0f, factor = 1.0f, share = 0.0f, hit = 1.0f, per_cap = 0.0f;
};

// `to` may be `row` itself. `g` is a copy: a reference, which the stores might change, is read again for each element.
template <bool kCapped, typename Scalar>
static void row_gradient(const Scalar* row, int64_t columns, int64_t label, const Gradient g, Scalar* to) {
  const auto at = [g](float value, float many, float few) {
    const float gradient = many * exp_nonpositive(g.scale * value - g.highest - g.log_sum) - few;
    const float tanh = value * g.per_cap;
    return kCapped ? gradient * (1.0f - tanh * tanh) : gradient;
  };
  const float at_label = g.by * at(load(row[label]), g.factor, g.hit + g.share);
  const float many = g.by * g.factor, few = g.by * g.share;
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) store(to + i, at(load(row[i]), many, few));
  store(to + label, at_label);
}

static void row_cap(float* row, int64_t columns, float scale, float cap) {
  const float by = scale / cap;
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) row[i] = cap * tanh(by * row[i]);
}

// Whether the label is the first of the largest values of a row.
static bool is_top(const float* row, int64_t columns, int64_t label) {
  const float value = row[label];
  bool larger = false;
  for (int64_t i = 0; i < label; ++i) larger |= row[i] >= value;
  for (int64_t i = label + 1; i < columns; ++i) larger |= row[i] > value;
  return !larger;
}

// Returns the loss of row `index` of a block, and replaces the row by its gradient, `by` times, if there is a `by`.
template <bool kCapped>
static float block_row(const stoker_cross_entropy_block_call& call, int64_t index, const float* by) {
  const int64_t columns = call.columns, label = call.labels[index];
  float* row = call.logits + index * columns;
  const float smoothing = call.label_smoothing, scale = kCapped ? 1.0f : call.scale;
  if (kCapped) row_cap(row, columns, call.scale, call.softcap);
  const float highest = scale * row_maximum(row, columns);
  const float log_sum = row_log_sum(row, columns, scale, highest), lse = highest + log_sum;
  if (call.entropy) {
    const double weighted = row_sum(row, columns, scale, highest, [](float x) {
      const float e = exp_nonpositive(x);
      return e > 0.0f ? x * e : 0.0f;  // not -inf * 0
    });
    call.entropy[index] = log_sum - static_cast<float>(weighted) * exp(-log_sum);
  }
  if (call.top) call.top[index] = is_top(row, columns, label);
  float below = highest - scale * row[label];
  if (smoothing != 0.0f) {
    const double total = row_sum(row, columns, scale, highest, [](float difference) { return difference; });
    below = (1.0f - smoothing) * below - smoothing * static_cast<float>(total / static_cast<double>(columns));
  }
  if (by) {
    Gradient g{highest, log_sum, *by * call.scale, scale};
    if (call.z_loss != 0.0f) g.factor = 1.0f + 2.0f * call.z_loss * lse;
    g.share = smoothing / static_cast<float>(columns);
    g.hit = 1.0f - smoothing;
    if (kCapped) g.per_cap = 1.0f / call.softcap;
    row_gradient<kCapped>(row, columns, label, g, row);
  }
  return log_sum + below + (call.z_loss != 0.0f ? call.z_loss * lse * lse : 0.0f);
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
          const float log_sum = row_log_sum(values, columns, 1.0f, highest);
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
          row_gradient<false>(static_cast<const Scalar*>(call->logits) + row * columns, columns, label,
                              Gradient{call->stats[row], call->stats[rows + row], call->scales[row]}, to);
        }
      });
    });
  });
}

STOKER_API int32_t stoker_cross_entropy_block(const stoker_cross_entropy_block_call* call) {
  using namespace stoker;
  return guarded([&] {
    const auto one_row = call->softcap > 0.0f ? block_row<true> : block_row<false>;
    parallel_tasks(call->rows, threads_for(call->rows * call->columns, call->threads), [&](int64_t row) {
      call->loss[row] = one_row(*call, row, call->scales ? call->scales + row : nullptr);
    });
  });
}
