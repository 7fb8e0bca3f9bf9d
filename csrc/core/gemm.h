// Small matrix products on data that is already in cache: C = A B (or C += A B) with B laid out in panels beforehand.
//
// This is the inner kernel of attention, where a general GEMM would spend its time on packing and call overhead. Large products
// go through kernels/linear.cpp. Vector types are the compiler's own, so the same source serves every instruction set.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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

// At most kPanel numbers, zero-filled at the right.
template <typename Scalar>
inline void pack_row(const Scalar* from, int64_t width, float* to) {
  if (width >= kPanel) {
#pragma omp simd
    for (int j = 0; j < kPanel; ++j) to[j] = load(from[j]);
  } else {
    for (int j = 0; j < kPanel; ++j) to[j] = j < width ? load(from[j]) : 0.0f;
  }
}

// Rows of B (depth x columns, B[p][j] = from[p * stride + j]) into panels of kPanel columns.
// Panel n starts at panels + n * kPanel * depth.
template <typename Scalar>
inline void pack_rows(const Scalar* from, int64_t stride, int64_t depth, int64_t columns, float* panels) {
  for (int64_t first = 0; first < columns; first += kPanel)
    for (int64_t p = 0; p < depth; ++p, panels += kPanel) pack_row(from + p * stride + first, columns - first, panels);
}

// kTranspose rows of kTranspose numbers become columns. Stores of one number at a time cost attention a tenth of its time.
#if defined(__AVX2__)
constexpr int kTranspose = 8;

inline __m256 load_eight(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load_eight(const bf16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <typename Scalar>
inline void transpose_square(const Scalar* from, int64_t stride, float* to, int64_t to_stride) {
  __m256 row[8], pair[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) row[i] = load_eight(from + i * stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {  // the upper four rows of `row` become the left halves of the columns
    const __m256* p = pair + 4 * half;
    row[4 * half] = _mm256_shuffle_ps(p[0], p[2], 0x44);
    row[4 * half + 1] = _mm256_shuffle_ps(p[0], p[2], 0xee);
    row[4 * half + 2] = _mm256_shuffle_ps(p[1], p[3], 0x44);
    row[4 * half + 3] = _mm256_shuffle_ps(p[1], p[3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(row[i], row[4 + i], 0x20));
    _mm256_storeu_ps(to + (4 + i) * to_stride, _mm256_permute2f128_ps(row[i], row[4 + i], 0x31));
  }
}
#else
constexpr int kTranspose = 4;

template <typename Scalar>
inline void transpose_square(const Scalar* from, int64_t stride, float* to, int64_t to_stride) {
  float rows[4][4];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) rows[j][i] = load(from[i * stride + j]);
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_stride, rows[i], sizeof rows[i]);
}
#endif

// The transpose: columns of B are rows in memory (B[p][j] = from[j * stride + p]).
template <typename Scalar>
inline void pack_columns(const Scalar* from, int64_t stride, int64_t depth, int64_t columns, float* panels) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, columns - first);
    int64_t j = 0;
    for (; j + kTranspose <= width; j += kTranspose) {
      const Scalar* rows = from + (first + j) * stride;
      int64_t p = 0;
      for (; p + kTranspose <= depth; p += kTranspose) transpose_square(rows + p, stride, panels + p * kPanel + j, kPanel);
      for (; p < depth; ++p)
        for (int i = 0; i < kTranspose; ++i) panels[p * kPanel + j + i] = load(rows[i * stride + p]);
    }
    for (; j < kPanel; ++j)
      for (int64_t p = 0; p < depth; ++p) panels[p * kPanel + j] = j < width ? load(from[(first + j) * stride + p]) : 0.0f;
    panels += kPanel * depth;
  }
}

// One register tile: R rows of A times one panel. A[i][p] = a[i * row_stride + p * depth_stride]. kApart: the product is summed from
// zero and then added to C, so that it does not matter to the result whether products were added one by one or by several threads.
template <int R, bool kAccumulate, bool kApart = false>
inline void multiply_tile(int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride, const float* panel,
                          float* c, int64_t c_stride) {
  fvec sum[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    if (kAccumulate && !kApart) {
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
    if (kApart) {
      sum[i][0] += load_vector(c + i * c_stride);
      sum[i][1] += load_vector(c + i * c_stride + kLanes);
    }
    store_vector(c + i * c_stride, sum[i][0]);
    store_vector(c + i * c_stride + kLanes, sum[i][1]);
  }
}

template <bool kAccumulate, bool kApart = false, int R = kRows>
inline void multiply_rows(int64_t rows, int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride,
                          const float* panel, float* c, int64_t c_stride) {
  if constexpr (R > 0) {
    if (rows == R)
      multiply_tile<R, kAccumulate, kApart>(depth, a, row_stride, depth_stride, panel, c, c_stride);
    else
      multiply_rows<kAccumulate, kApart, R - 1>(rows, depth, a, row_stride, depth_stride, panel, c, c_stride);
  }
}

// C (rows x columns, columns rounded up to whole panels) = or += A (rows x depth) * panels.
// A is addressed by two strides, one of which is 1: row-major, or its transpose. Panels lie panel_stride floats apart:
// kPanel * depth, or more where only part of the packed depth takes part.
template <bool kAccumulate, bool kApart = false>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride,
                     const float* panels, int64_t panel_stride, float* c, int64_t c_stride) {
  for (int64_t first = 0; first < columns; first += kPanel, panels += panel_stride) {
    int64_t i = 0;
    if (depth_stride == 1) {
      for (; i + kRows <= rows; i += kRows)
        multiply_tile<kRows, kAccumulate, kApart>(depth, a + i * row_stride, row_stride, 1, panels, c + i * c_stride + first,
                                                  c_stride);
    } else {
      for (; i + kRows <= rows; i += kRows)
        multiply_tile<kRows, kAccumulate, kApart>(depth, a + i, 1, depth_stride, panels, c + i * c_stride + first, c_stride);
    }
    if (i < rows)
      multiply_rows<kAccumulate, kApart>(rows - i, depth, a + i * row_stride, row_stride, depth_stride, panels,
                                 c + i * c_stride + first, c_stride);
  }
}

}  // namespace stoker
