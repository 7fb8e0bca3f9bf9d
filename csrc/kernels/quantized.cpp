// Weights in 4 bits (NF4: 16 levels of the normal distribution, blocks of 64) and in 8 bits (one scale per row).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

namespace {

constexpr int64_t kBlock = 64;

// The quantiles of QLoRA (arXiv 2305.14314, appendix E): -1, 0 and 1 are among them.
constexpr float kLevels[16] = {-1.0f,
                               -0.6961928009986877f,
                               -0.5250730514526367f,
                               -0.39491748809814453f,
                               -0.28444138169288635f,
                               -0.18477343022823334f,
                               -0.09105003625154495f,
                               0.0f,
                               0.07958029955625534f,
                               0.16093020141124725f,
                               0.24611230194568634f,
                               0.33791524171829224f,
                               0.44070982933044434f,
                               0.5626170039176941f,
                               0.7229568362236023f,
                               1.0f};
constexpr uint8_t kZero = 7;  // the code of level 0

template <typename Scalar>
float largest(const Scalar* values, int64_t count) {
  float most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(load(values[i])));
  return most;
}

// The level nearest to `value`: how many midpoints between neighbours lie below it.
inline int nearest_level(float value) {
  int code = 0;
  for (int level = 0; level < 15; ++level) code += value > 0.5f * (kLevels[level] + kLevels[level + 1]);
  return code;
}

template <typename Scalar>
void quantize_four(const Scalar* values, uint8_t* codes, float* scales, int64_t count, int threads) {
  parallel_ranges((count + kBlock - 1) / kBlock, threads_for(count, threads), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, width = std::min(kBlock, count - first);
      const float scale = largest(values + first, width);
      scales[block] = scale;
      int code[kBlock];
      std::fill(code, code + kBlock, static_cast<int>(kZero));
      // Divided, not multiplied by 1 / scale, which would be infinite for a tiny scale.
      if (scale > 0) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) code[i] = nearest_level(load(values[first + i]) / scale);
      }
      for (int64_t i = 0; i < width; i += 2) codes[(first + i) / 2] = static_cast<uint8_t>(code[i] << 4 | code[i + 1]);
    }
  });
}

// The levels of both codes of each byte: half the loads of looking up each code by itself.
struct Pairs {
  float levels[256][2];
  constexpr Pairs() : levels{} {
    for (int byte = 0; byte < 256; ++byte) {
      levels[byte][0] = kLevels[byte >> 4];
      levels[byte][1] = kLevels[byte & 15];
    }
  }
};
constexpr Pairs kPairs;

template <typename Scalar>
void dequantize_four(const uint8_t* codes, const float* scales, Scalar* values, int64_t count, int threads) {
  parallel_ranges((count + kBlock - 1) / kBlock, threads_for(count, threads), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, width = std::min(kBlock, count - first);
      const uint8_t* from = codes + first / 2;
      Scalar* to = values + first;
      const float scale = scales[block];
      float levels[kBlock];
      for (int64_t i = 0; i < (width + 1) / 2; ++i) std::memcpy(levels + 2 * i, kPairs.levels[from[i]], 2 * sizeof(float));
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(to + i, levels[i] * scale);
    }
  });
}

constexpr float kMost = 127;  // -128 is not used: the codes are symmetric

template <typename Scalar>
void quantize_eight(const Scalar* values, int8_t* codes, float* scales, int64_t rows, int64_t columns, int threads) {
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Scalar* from = values + row * columns;
      int8_t* to = codes + row * columns;
      const float scale = largest(from, columns);
      scales[row] = scale;
      const float divisor = scale > 0 ? scale : 1.0f;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) to[i] = static_cast<int8_t>(std::nearbyint(load(from[i]) / divisor * kMost));
    }
  });
}

template <typename Scalar>
void dequantize_eight(const int8_t* codes, const float* scales, Scalar* values, int64_t rows, int64_t columns, int threads) {
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int8_t* from = codes + row * columns;
      Scalar* to = values + row * columns;
      const float scale = scales[row] / kMost;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) store(to + i, static_cast<float>(from[i]) * scale);
    }
  });
}

}  // namespace

}  // namespace stoker

STOKER_API int32_t stoker_quantize(const stoker_quantized_call* call) {
  using namespace stoker;
  return guarded([&] {
    for_dtype(call->dtype, [&](auto* tag) {
      const auto* values = static_cast<const std::remove_pointer_t<decltype(tag)>*>(call->values);
      if (call->bits == 4)
        quantize_four(values, static_cast<uint8_t*>(call->codes), call->scales, call->rows * call->columns, call->threads);
      else
        quantize_eight(values, static_cast<int8_t*>(call->codes), call->scales, call->rows, call->columns, call->threads);
    });
  });
}

STOKER_API int32_t stoker_dequantize(const stoker_quantized_call* call) {
  using namespace stoker;
  return guarded([&] {
    for_dtype(call->dtype, [&](auto* tag) {
      auto* values = static_cast<std::remove_pointer_t<decltype(tag)>*>(call->values);
      if (call->bits == 4)
        dequantize_four(static_cast<const uint8_t*>(call->codes), call->scales, values, call->rows * call->columns,
                        call->threads);
      else
        dequantize_eight(static_cast<const int8_t*>(call->codes), call->scales, values, call->rows, call->columns,
                         call->threads);
    });
  });
}
