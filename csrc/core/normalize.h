// One row of LayerNorm or RMSNorm, forward and backward: what norm.cpp and embedding.cpp have in common.
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

// Two passes over a row that lies in cache: no cancellation, as E[z^2] - mean^2 would have.
inline Moments moments(const float* z, int64_t columns, float eps, bool rms) {
  const float mean = rms ? 0.0f : sum(z, columns) / static_cast<float>(columns);
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

// Replaces z by its normalised form and g = dy * weight by dz (without the factor of anything before the norm), and adds
// this row's share of the gradients of weight and bias.
//   dz = rstd * (g - mean(g) - zhat * mean(g * zhat)),   without mean(g) for RMSNorm
inline void normalize_row_backward(float* z, Moments m, const float* weight, int64_t columns, bool rms, float* g,
                                   float* dweight, float* dbias) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    const float hat = (z[i] - m.mean) * m.rstd, dy = g[i];
    z[i] = hat;
    g[i] = dy * weight[i];
    dweight[i] += dy * hat;
    dbias[i] += dy;
  }
  const float scale = 1.0f / static_cast<float>(columns);
  const float mean_g = rms ? 0.0f : sum(g, columns) * scale;
  const float mean_gz = dot(g, z, columns) * scale;
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) g[i] = m.rstd * (g[i] - mean_g - z[i] * mean_gz);
}

}  // namespace stoker
