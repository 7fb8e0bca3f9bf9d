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
static void sum_row(const Scalar* x, const Scalar* residual, const float* x_bias, const float* factors, int64_t columns,
                    float* z) {
  if (factors && residual) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) z[i] = load(residual[i]) + (load(x[i]) + x_bias[i]) * factors[i];
  } else if (factors) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) z[i] = (load(x[i]) + x_bias[i]) * factors[i];
  } else if (residual) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) z[i] = load(residual[i]) + (load(x[i]) + x_bias[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) z[i] = load(x[i]) + x_bias[i];
  }
}

template <typename Scalar>
struct Sum {
  const Scalar* x;
  const Scalar* residual;  // or null
  const float* x_bias;     // zeros if there is none
  Dropout dropout;
  int64_t columns;

  // Writes row `row` of the sum to z, and returns its dropout factors, or null.
  const float* operator()(int64_t row, float* z, float* factors) const {
    const int64_t at = row * columns;
    const float* used = with_factors(row, factors);
    sum_row(x + at, residual ? residual + at : nullptr, x_bias, used, columns, z);
    return used;
  }
  const float* with_factors(int64_t row, float* factors) const {
    if (!dropout.active()) return nullptr;
    row_factors(dropout, row, columns, factors);
    return factors;
  }
};

template <typename Scalar>
static void forward(const Sum<Scalar>& sum_of, const float* weight, const float* bias, Scalar* y, Scalar* z_out,
                    float* stats, int64_t rows, float eps, bool rms, int threads) {
  const int64_t columns = sum_of.columns, room = columns + kRandomGroup;
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    float* z = thread_row<0>(room);
    float* factors = thread_row<1>(room);
    for (int64_t row = begin; row < end; ++row) {
      sum_of(row, z, factors);
      if (z_out) {
        // What is normalised is the sum as it was stored, so that backward sees the same numbers.
        Scalar* stored = z_out + row * columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          store(stored + i, z[i]);
          z[i] = load(stored[i]);
        }
      }
      const Moments m = moments(z, columns, eps, rms);
      stats[row] = m.mean;
      stats[rows + row] = m.rstd;
      normalize_row(z, m, weight, bias, columns, y + row * columns);
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

enum { kWeight, kBias, kInputBias, kKinds };

template <typename Scalar>
static void backward(const Sum<Scalar>& sum_of, const Gradients<Scalar>& of, const float* weight, const float* stats,
                     const ColumnSums& sums, int64_t rows, bool rms, int threads) {
  const int64_t columns = sum_of.columns, room = columns + kRandomGroup;
  parallel_tasks(sums.count, threads_for(rows * columns, threads), [&](int64_t block) {
    float* z = thread_row<0>(room);
    float* factors = thread_row<1>(room);
    float* g = thread_row<2>(room);
    float* dweight = sums.start(block, kWeight);
    float* dbias = sums.start(block, kBias);
    float* dx_bias = sums.start(block, kInputBias);
    for (int64_t row = block * sums.size; row < std::min(rows, (block + 1) * sums.size); ++row) {
      const int64_t at = row * columns;
      const float* used;
      if (of.z) {
        const Scalar* stored = of.z + at;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) z[i] = load(stored[i]);
        used = sum_of.with_factors(row, factors);
      } else {
        used = sum_of(row, z, factors);
      }
      const Scalar* dy = of.dy + at;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) g[i] = load(dy[i]);
      normalize_row_backward(z, {stats[row], stats[rows + row]}, weight, columns, rms, g, dweight, dbias);
      if (of.dz_in) {
        const Scalar* more = of.dz_in + at;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) g[i] += load(more[i]);
      }
      if (of.dresidual) {
        Scalar* to = of.dresidual + at;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) store(to + i, g[i]);
      }
      if (used) {
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) g[i] *= used[i];
      }
      if (of.dx) {
        Scalar* to = of.dx + at;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          store(to + i, g[i]);
          dx_bias[i] += g[i];
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) dx_bias[i] += g[i];
      }
    }
  });
}

}  // namespace stoker

STOKER_API void stoker_norm_forward(const void* x, const void* residual, const void* x_bias, const void* weight,
                                    const void* bias, void* y, void* z, float* stats, int64_t rows, int64_t columns,
                                    float p, uint64_t key, float eps, int rms, int dtype, int x_bias_dtype,
                                    int weight_dtype, int bias_dtype, int threads) {
  using namespace stoker;
  const Buffer<float> wide_x_bias = widen(x_bias, x_bias_dtype, columns), wide_bias = widen(bias, bias_dtype, columns),
                      wide_weight = widen(weight, weight_dtype, columns);
  for_dtype(dtype, [&](auto* tag) {
    using Scalar = std::remove_pointer_t<decltype(tag)>;
    const Sum<Scalar> sum_of{static_cast<const Scalar*>(x), static_cast<const Scalar*>(residual), wide_x_bias.get(),
                             Dropout(p, key), columns};
    forward(sum_of, wide_weight.get(), wide_bias.get(), static_cast<Scalar*>(y), static_cast<Scalar*>(z), stats, rows, eps,
            rms != 0, threads);
  });
}

STOKER_API void stoker_norm_backward(const void* dy, const void* dz, const void* x, const void* residual, const void* z,
                                     const void* x_bias, const void* weight, const float* stats, void* dx,
                                     void* dresidual, void* dweight, void* dbias, void* dx_bias, int64_t rows,
                                     int64_t columns, float p, uint64_t key, int rms, int dtype, int x_bias_dtype,
                                     int weight_dtype, int bias_dtype, int threads) {
  using namespace stoker;
  const Buffer<float> wide_x_bias = widen(x_bias, x_bias_dtype, columns), wide_weight = widen(weight, weight_dtype, columns);
  const ColumnSums sums(rows, columns, kKinds);
  for_dtype(dtype, [&](auto* tag) {
    using Scalar = std::remove_pointer_t<decltype(tag)>;
    const Sum<Scalar> sum_of{static_cast<const Scalar*>(x), static_cast<const Scalar*>(residual), wide_x_bias.get(),
                             Dropout(p, key), columns};
    const Gradients<Scalar> of{static_cast<const Scalar*>(dy), static_cast<const Scalar*>(dz),
                               static_cast<const Scalar*>(z), static_cast<Scalar*>(dx), static_cast<Scalar*>(dresidual)};
    backward(sum_of, of, wide_weight.get(), stats, sums, rows, rms != 0, threads);
  });
  sums.finish(kWeight, dweight, weight_dtype, threads);
  sums.finish(kBias, dbias, bias_dtype, threads);
  sums.finish(kInputBias, dx_bias, x_bias_dtype, threads);
}
