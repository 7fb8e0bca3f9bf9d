// Small matrix products on data that is already in cache: C = A B (or C += A B) with B laid out in panels beforehand.
//
// This is the inner kernel of attention, where a general GEMM would spend its time on packing and call overhead. Large products
// go through kernels/linear.cpp. Vector types are the compiler's own, so the same source serves every instruction set.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SSE__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "core/types.h"

namespace stoker {

// The register tile: kRows x kPanel accumulators, kPanel being two vectors wide, within the registers there are:
// 32 of 16 floats (AVX-512), 16 of 8 (AVX2), 16 of 4 (SSE, NEON).
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;

typedef float fvec __attribute__((vector_size(kLanes * 4)));
typedef float fvec_unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline fvec load_vector(const float* from) { return *reinterpret_cast<const fvec_unaligned*>(from); }
inline void store_vector(float* to, fvec value) { *reinterpret_cast<fvec_unaligned*>(to) = value; }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Scratch memory of one thread. It grows to the largest request and is kept: memory given back to the system after every
// call would be mapped again, page by page, at the next.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Makes room for `floats` in all, to be handed out by take().
  void reserve(int64_t floats) {
    used_ = 0;
    if (floats <= capacity_) return;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;  // should there be no memory now, the next call must not find the old size
    // Whole huge pages where the request is that large: packed panels are read in strides that miss small pages' TLB.
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float), page = bytes >= kHugePage ? kHugePage : 64;
    const size_t rounded = (bytes + page - 1) / page * page;
    data_ = static_cast<float*>(std::aligned_alloc(page, rounded));
    if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (page == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
    capacity_ = floats;
  }
  float* take(int64_t floats) {
    float* piece = data_ + used_;
    used_ += round_up(floats, 16);
    return piece;
  }

  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;
  float* data_ = nullptr;
  int64_t capacity_ = 0, used_ = 0;
};

// Rows of B (depth x columns, B[p][j] = from[p * stride + j]) into panels of kPanel columns, zero-filled at the right.
// Panel n starts at panels + n * kPanel * depth.
template <typename Scalar>
inline void pack_rows(const Scalar* from, int64_t stride, int64_t depth, int64_t columns, float* panels) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, columns - first);
    for (int64_t p = 0; p < depth; ++p) {
      const Scalar* row = from + p * stride + first;
      if (width == kPanel) {
#pragma omp simd
        for (int j = 0; j < kPanel; ++j) panels[j] = load(row[j]);
      } else {
        for (int j = 0; j < kPanel; ++j) panels[j] = j < width ? load(row[j]) : 0.0f;
      }
      panels += kPanel;
    }
  }
}

// Four rows of four numbers become four columns. Scalar stores one number at a time cost attention a tenth of its time.
template <typename Scalar>
inline void transpose_4x4(const Scalar* from, int64_t stride, float* to, int64_t to_stride) {
#if defined(__SSE__)
  alignas(16) float rows[4][4];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) rows[i][j] = load(from[i * stride + j]);
  __m128 a = _mm_load_ps(rows[0]), b = _mm_load_ps(rows[1]), c = _mm_load_ps(rows[2]), d = _mm_load_ps(rows[3]);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + to_stride, b);
  _mm_storeu_ps(to + 2 * to_stride, c);
  _mm_storeu_ps(to + 3 * to_stride, d);
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) to[j * to_stride + i] = load(from[i * stride + j]);
#endif
}

// The transpose: columns of B are rows in memory (B[p][j] = from[j * stride + p]).
template <typename Scalar>
inline void pack_columns(const Scalar* from, int64_t stride, int64_t depth, int64_t columns, float* panels) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, columns - first);
    int64_t j = 0;
    for (; j + 4 <= width; j += 4) {
      const Scalar* row = from + (first + j) * stride;
      int64_t p = 0;
      for (; p + 4 <= depth; p += 4) transpose_4x4(row + p, stride, panels + p * kPanel + j, kPanel);
      for (; p < depth; ++p)
        for (int i = 0; i < 4; ++i) panels[p * kPanel + j + i] = load(row[i * stride + p]);
    }
    for (; j < width; ++j) {
      const Scalar* row = from + (first + j) * stride;
      for (int64_t p = 0; p < depth; ++p) panels[p * kPanel + j] = load(row[p]);
    }
    for (; j < kPanel; ++j)
      for (int64_t p = 0; p < depth; ++p) panels[p * kPanel + j] = 0.0f;
    panels += kPanel * depth;
  }
}

// One register tile: R rows of A times one panel. A[i][p] = a[i * row_stride + p * depth_stride].
template <int R, bool kAccumulate>
inline void multiply_tile(int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride, const float* panel,
                          float* c, int64_t c_stride) {
  fvec sum[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    if (kAccumulate) {
      sum[i][0] = load_vector(c + i * c_stride);
      sum[i][1] = load_vector(c + i * c_stride + kLanes);
    } else {
      sum[i][0] = fvec{};
      sum[i][1] = fvec{};
    }
  }
  for (int64_t p = 0; p < depth; ++p) {
    const fvec b0 = load_vector(panel), b1 = load_vector(panel + kLanes);
    panel += kPanel;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float value = a[i * row_stride];
      sum[i][0] += value * b0;
      sum[i][1] += value * b1;
    }
    a += depth_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    store_vector(c + i * c_stride, sum[i][0]);
    store_vector(c + i * c_stride + kLanes, sum[i][1]);
  }
}

template <bool kAccumulate, int R = kRows>
inline void multiply_rows(int64_t rows, int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride,
                          const float* panel, float* c, int64_t c_stride) {
  if constexpr (R > 0) {
    if (rows == R)
      multiply_tile<R, kAccumulate>(depth, a, row_stride, depth_stride, panel, c, c_stride);
    else
      multiply_rows<kAccumulate, R - 1>(rows, depth, a, row_stride, depth_stride, panel, c, c_stride);
  }
}

// C (rows x columns, columns rounded up to whole panels) = or += A (rows x depth) * panels.
// A is addressed by two strides, one of which is 1: row-major, or its transpose. Panels lie panel_stride floats apart:
// kPanel * depth, or more where only part of the packed depth takes part.
template <bool kAccumulate>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride,
                     const float* panels, int64_t panel_stride, float* c, int64_t c_stride) {
  for (int64_t first = 0; first < columns; first += kPanel, panels += panel_stride) {
    int64_t i = 0;
    if (depth_stride == 1) {
      for (; i + kRows <= rows; i += kRows)
        multiply_tile<kRows, kAccumulate>(depth, a + i * row_stride, row_stride, 1, panels, c + i * c_stride + first, c_stride);
    } else {
      for (; i + kRows <= rows; i += kRows)
        multiply_tile<kRows, kAccumulate>(depth, a + i, 1, depth_stride, panels, c + i * c_stride + first, c_stride);
    }
    if (i < rows)
      multiply_rows<kAccumulate>(rows - i, depth, a + i * row_stride, row_stride, depth_stride, panels,
                                 c + i * c_stride + first, c_stride);
  }
}

}  // namespace stoker
