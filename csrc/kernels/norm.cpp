// Dropout + residual + LayerNorm or RMSNorm.
//   z = residual + (x + x_bias) * factor,   y = (z - mean) * rstd * weight + bias
// Any part but the norm itself may be missing. Backward computes z again from x and residual, unless z was an output.
#include "core/buffer.h"
#include "core/normalize.h"
#include "core/parallel.h"
#include "core/random.h"
#include "core/reduce.h"
#include "core/types.h"

namespace stoker {

template <typename Scalar>
struct Sum {
  const Scalar* x;
  const Scalar* residual;  // or null
  const float* x_bias;     // zeros if there is none
  bool has_bias;
  Dropout dropout;
  int64_t columns;

  Sum(const stoker_layer_norm_call& call, const float* wide_x_bias)
      : x(static_cast<const Scalar*>(call.x)), residual(static_cast<const Scalar*>(call.residual)), x_bias(wide_x_bias),
        has_bias(call.x_bias != nullptr), dropout(call.p, call.key), columns(call.columns) {}

  // Calls f(z, factors), z(i) being element i of the sum in row `row`, and factors those of the dropout, or null.
  template <typename F>
  void row(int64_t row, float* room, F&& f) const {
    const int64_t at = row * columns;
    const Scalar* from = x + at;
    const Scalar* add = residual ? residual + at : nullptr;
    const float* bias = x_bias;
    const float* factors = factors_of(row, room);
    if (factors && add)
      f([=](int64_t i) { return load(add[i]) + (load(from[i]) + bias[i]) * factors[i]; }, factors);
    else if (factors)
      f([=](int64_t i) { return (load(from[i]) + bias[i]) * factors[i]; }, factors);
    else if (add)
      f([=](int64_t i) { return load(add[i]) + (load(from[i]) + bias[i]); }, factors);
    else
      f([=](int64_t i) { return load(from[i]) + bias[i]; }, factors);
  }
  // The row itself, where nothing is added to it, no factor applied and no type changed; else null.
  const float* as_it_is(int64_t row) const {
    if constexpr (std::is_same_v<Scalar, float>) {
      if (!residual && !has_bias && !dropout.active()) return x + row * columns;
    }
    return nullptr;
  }
  const float* factors_of(int64_t row, float* room) const {
    if (!dropout.active()) return nullptr;
    row_factors(dropout, row, columns, room);
    return room;
  }
};

// z[i] = at(i); returns the sum.
template <typename F>
static float copy_row(F&& at, int64_t columns, float* z) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < columns; ++i) {
    z[i] = at(i);
    total += z[i];
  }
  return total;
}

// Stores z, and replaces it by what was stored, so that forward and backward normalise the same numbers; returns the sum.
template <typename Scalar>
static float store_row(float* z, Scalar* to, int64_t columns) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    store(to + i, z[i]);
    z[i] = load(to[i]);
  }
  return sum(z, columns);
}

template <typename Scalar>
static void forward(const Sum<Scalar>& sum_of, const float* weight, const float* bias, Scalar* y, Scalar* z_out,
                    float* stats, int64_t rows, float eps, bool rms, int threads) {
  const int64_t columns = sum_of.columns, room = columns + kRandomGroup;
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    float* z = thread_row<0>(room);
    float* factors = thread_row<1>(room);
    for (int64_t row = begin; row < end; ++row) {
      float total = 0;
      const float* values = z_out ? nullptr : sum_of.as_it_is(row);
      if (values) {
        total = sum(values, columns);
      } else {
        sum_of.row(row, factors, [&](auto&& at, const float*) { total = copy_row(at, columns, z); });
        if (z_out) total = store_row(z, z_out + row * columns, columns);
        values = z;
      }
      const Moments m = moments(values, total, columns, eps, rms);
      stats[row] = m.mean;
      stats[rows + row] = m.rstd;
      normalize_row(values, m, weight, bias, columns, y + row * columns);
    }
  });
}

template <typename Scalar>
struct Gradients {
  const Scalar* dy;
  const Scalar* dz_in;  // of the sum where it was an output, or null
  const Scalar* z;      // the sum where it was an output, or null
  Scalar* dx;           // null if the same as dresidual
  Scalar* dresidual;    // null if nobody asks
};

enum { kWeight, kBias, kInputBias };

// dz of a row into dresidual, dz * factor into dx, and the latter's share of the gradient of x_bias.
template <typename Scalar>
static void write_row(const Gradients<Scalar>& of, int64_t at, const RowGradient& gradient, const float* factors,
                      const float* hat, float* g, int64_t columns, float* dx_bias /* or null */) {
  const Scalar* more = of.dz_in ? of.dz_in + at : nullptr;
  Scalar* to_x = of.dx ? of.dx + at : nullptr;
  Scalar* to_residual = of.dresidual ? of.dresidual + at : nullptr;
  for_flag(of.dz_in, [&](auto has_more) {
    for_flag(of.dresidual, [&](auto has_residual) {
      for_flag(factors, [&](auto has_factors) {
        for_flag(dx_bias, [&](auto has_bias) {
#pragma omp simd
          for (int64_t i = 0; i < columns; ++i) {
            float d = gradient.at(g[i], hat[i]);
            if constexpr (has_more) d += load(more[i]);
            if constexpr (has_residual) store(to_residual + i, d);
            if constexpr (has_factors) {
              d *= factors[i];
              store(to_x + i, d);
            }
            if constexpr (has_bias) dx_bias[i] += d;
          }
        });
      });
    });
  });
}

template <typename Scalar>
static void backward(const Sum<Scalar>& sum_of, const Gradients<Scalar>& of, const float* weight, const float* stats,
                     const ColumnSums& sums, int64_t rows, bool rms, int threads) {
  const int64_t columns = sum_of.columns, room = columns + kRandomGroup;
  parallel_tasks(sums.count, threads_for(rows * columns, threads), [&](int64_t block) {
    float* hat = thread_row<0>(room);
    float* factor_row = thread_row<1>(room);
    float* g = thread_row<2>(room);
    sums.run(block, [&](int64_t begin, int64_t end, float* const* to) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * columns;
        const Moments m{stats[row], stats[rows + row]};
        const Scalar* dy = of.dy + at;
        const auto finish = [&](auto&& z, const float* factors) {
          const RowGradient gradient = read_row(z, [=](int64_t i) { return load(dy[i]); }, m, weight, columns, rms, hat, g,
                                                ParameterSums{to[kWeight], to[kBias]});
          write_row(of, at, gradient, factors, hat, g, columns, to[kInputBias]);
        };
        if (of.z) {
          const Scalar* stored = of.z + at;
          finish([=](int64_t i) { return load(stored[i]); }, sum_of.factors_of(row, factor_row));
        } else {
          sum_of.row(row, factor_row, finish);
        }
      }
    });
  });
}

}  // namespace stoker

STOKER_API int32_t stoker_layer_norm_forward(const stoker_layer_norm_call* call) {
  using namespace stoker;
  return guarded([&] {
    const int64_t columns = call->columns;
    const Buffer<float> x_bias = widen(call->x_bias, call->x_bias_dtype, columns),
                        weight = widen(call->weight, call->weight_dtype, columns),
                        bias = widen(call->bias, call->bias_dtype, columns);
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      forward(Sum<Scalar>(*call, x_bias.get()), weight.get(), bias.get(), static_cast<Scalar*>(call->y),
              static_cast<Scalar*>(call->z), call->stats, call->rows, call->eps, call->rms != 0, call->threads);
    });
  });
}

STOKER_API int32_t stoker_layer_norm_backward(const stoker_layer_norm_call* call) {
  using namespace stoker;
  return guarded([&] {
    const int64_t columns = call->columns;
    const Buffer<float> x_bias = widen(call->x_bias, call->x_bias_dtype, columns),
                        weight = widen(call->weight, call->weight_dtype, columns);
    const bool trained = call->dweight || call->dbias;
    const ColumnSums sums(call->rows, columns, {trained, trained, call->dx_bias != nullptr}, call->threads);
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      const Gradients<Scalar> of{static_cast<const Scalar*>(call->dy), static_cast<const Scalar*>(call->dz),
                                 static_cast<const Scalar*>(call->z), static_cast<Scalar*>(call->dx),
                                 static_cast<Scalar*>(call->dresidual)};
      backward(Sum<Scalar>(*call, x_bias.get()), of, weight.get(), call->stats, sums, call->rows,
               call->rms != 0, call->threads);
    });
    sums.finish({{kWeight, call->dweight, call->weight_dtype},
                 {kBias, call->dbias, call->bias_dtype},
                 {kInputBias, call->dx_bias, call->x_bias_dtype}},
                call->threads);
  });
}
