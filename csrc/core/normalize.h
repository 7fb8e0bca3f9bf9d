// One row of LayerNorm or RMSNorm, forward and backward: what kernels/norm.cpp and kernels/embedding.cpp have in common.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/reduce.h"

namespace stoker {

struct Moments {
  float mean, rstd;
};

// For rows whose squares leave the range of fp32 (and for those with an infinity or NaN, which stay what they are).
inline Moments wide_moments(const float* z, int64_t columns, float eps, bool rms) {
  double mean = 0, variance = 0;
  if (!rms)
    for (int64_t i = 0; i < columns; ++i) mean += z[i];
  mean /= static_cast<double>(columns);
  for (int64_t i = 0; i < columns; ++i) variance += (z[i] - mean) * (z[i] - mean);
  variance /= static_cast<double>(columns);
  return {static_cast<float>(mean), static_cast<float>(1.0 / std::sqrt(variance + eps))};
}

// Of a row that lies in cache, given its sum. A second pass: no cancellation, as E[z^2] - mean^2 would have.
inline Moments moments(const float* z, float sum_z, int64_t columns, float eps, bool rms) {
  const float mean = rms ? 0.0f : sum_z / static_cast<float>(columns);
  const float variance = sum_of_squares(z, columns, mean) / static_cast<float>(columns);
  if (!std::isfinite(variance)) return wide_moments(z, columns, eps, rms);
  return {mean, 1.0f / std::sqrt(variance + eps)};
}

// y = (z - mean) * rstd * weight + bias.
template <typename Scalar>
inline void normalize_row(const float* z, Moments m, const float* weight, const float* bias, int64_t columns, Scalar* y) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) store(y + i, (z[i] - m.mean) * m.rstd * weight[i] + bias[i]);
}

// What backward needs of a row once it was read: zhat, g = dy * weight, and their means.
//   dz = rstd * (g - mean(g) - zhat * mean(g * zhat)),   without mean(g) for RMSNorm
struct RowGradient {
  float rstd, mean_g, mean_gz;
  float at(float g, float hat) const { return rstd * (g - mean_g - hat * mean_gz); }
};

// Where the gradients of weight and bias are summed, both or neither: null if weight and bias are frozen.
struct ParameterSums {
  float *weight, *bias;
};

// Reads a row by z(i) and dy(i), writes zhat and g, and adds the row's share of the gradients of weight and bias. One loop:
// what bounds it is the traffic of its own rows, not the two sums.
template <typename Z, typename Dy>
inline RowGradient read_row(Z&& z, Dy&& dy, Moments m, const float* weight, int64_t columns, bool rms, float* hat, float* g,
                            ParameterSums sums) {
  RowGradient gradient{m.rstd, 0.0f, 0.0f};
  for_flag(sums.weight, [&](auto trained) {
    float sum_g = 0, sum_gz = 0;
#pragma omp simd reduction(+ : sum_g, sum_gz)
    for (int64_t i = 0; i < columns; ++i) {
      const float h = (z(i) - m.mean) * m.rstd, d = dy(i), gi = d * weight[i];
      hat[i] = h;
      g[i] = gi;
      if constexpr (trained) {
        sums.weight[i] += d * h;
        sums.bias[i] += d;
      }
      sum_g += gi;
      sum_gz += gi * h;
    }
    const float scale = 1.0f / static_cast<float>(columns);
    gradient.mean_g = rms ? 0.0f : sum_g * scale;
    gradient.mean_gz = sum_gz * scale;
  });
  return gradient;
}

}  // namespace stoker
