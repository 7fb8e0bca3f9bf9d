// Products of the linear layers, Y = X W^T + b, dX = dY W, dW = dY^T X, db = column sums of dY.
//
// Two engines share the work here; PyTorch's own is the third and never enters this file.
//   own:      panels of B are packed once by all threads, then tiles of 96 rows by 384 columns are handed out; the sums of a tile
//             stay in cache and leave it with bias and rounding applied. Operands in bf16 are widened as they are packed.
//   openblas: tiles are handed out the same way and each is one single-threaded sgemm of OpenBLAS; bf16 tiles are widened first.
// Tiles are cut by shape alone and each is summed by one thread in a fixed order: results do not depend on the thread count.
#include <algorithm>
#include <vector>

#include "core/gemm.h"
#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

typedef void (*Sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                      const float* b, int ldb, float beta, float* c, int ldc);

namespace {

constexpr int64_t kTileRows = 96, kTileColumns = 384;
constexpr int64_t kDepth = 256;  // a panel of B of this depth is 16 KB on AVX2 and stays in L1 while the tile's rows pass by
constexpr int64_t kTileStride = kTileColumns + 16;
constexpr int64_t kBatch = 4;  // panels packed by a thread at a time
constexpr int64_t kPackedFloats = 4 << 20;  // B is packed in pieces of at most 16 MB, for the last-level cache's sake

template <typename Scalar>
void pack_panel(const stoker_operand& b, int64_t depth, int64_t first, int64_t width, float* panel) {
  const Scalar* data = static_cast<const Scalar*>(b.data);
  if (b.column_stride == 1) {
    pack_rows(data + first, b.row_stride, depth, width, panel);
    return;
  }
  // Rows of W become columns. Pieces of 64 along the depth keep what is written in L1.
  for (int64_t from = 0; from < depth; from += 64) {
    const int64_t count = std::min<int64_t>(64, depth - from);
    pack_columns(data + first * b.column_stride + from, b.column_stride, count, width, panel + from * kPanel);
  }
}

// Rows [row, row + rows) and depth [from, from + depth) of A, dense. Keeps the order of memory: the strides say which it is.
template <typename Scalar>
void pack_block(const stoker_operand& a, int64_t row, int64_t rows, int64_t from, int64_t depth, float* to, int64_t* row_stride,
                int64_t* depth_stride) {
  const Scalar* data = static_cast<const Scalar*>(a.data);
  if (a.column_stride == 1) {
    *row_stride = kDepth;
    *depth_stride = 1;
    for (int64_t i = 0; i < rows; ++i) {
      const Scalar* source = data + (row + i) * a.row_stride + from;
#pragma omp simd
      for (int64_t p = 0; p < depth; ++p) to[i * kDepth + p] = load(source[p]);
    }
  } else {
    *row_stride = 1;
    *depth_stride = kTileRows;
    for (int64_t p = 0; p < depth; ++p) {
      const Scalar* source = data + (from + p) * a.column_stride + row;
#pragma omp simd
      for (int64_t i = 0; i < rows; ++i) to[p * kTileRows + i] = load(source[i]);
    }
  }
}

// A finished tile of fp32 sums into C, with the bias.
template <typename Scalar, typename Bias>
void store_tile(const stoker_product_call& product, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* tile,
                int64_t tile_stride) {
  const Bias* bias = static_cast<const Bias*>(product.bias);
  for (int64_t i = 0; i < rows; ++i) {
    Scalar* to = static_cast<Scalar*>(product.c) + (row + i) * product.c_stride + column;
    const float* from = tile + i * tile_stride;
    if (bias) {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) store(to + j, from[j] + load(bias[column + j]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) store(to + j, from[j]);
    }
  }
}

void store_tile_any(const stoker_product_call& product, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* tile,
                    int64_t tile_stride) {
  for_dtype(product.c_dtype, [&](auto* c) {
    for_dtype(product.bias_dtype, [&](auto* bias) {
      store_tile<std::remove_pointer_t<decltype(c)>, std::remove_pointer_t<decltype(bias)>>(product, row, rows, column, columns,
                                                                                           tile, tile_stride);
    });
  });
}

// --- own engine ---------------------------------------------------------------------------------------------------------

void own_tile(const stoker_product_call& product, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* packed,
              int64_t packed_depth, int64_t first_column) {
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve(kTileRows * (kTileStride + kDepth) + 64);
  float* tile = scratch.take(kTileRows * kTileStride);
  float* block = scratch.take(kTileRows * kDepth);
  const int64_t panel_stride = kPanel * packed_depth;
  const float* panels = packed + (column - first_column) * packed_depth;
  bool started = false;
  int64_t done = 0;  // depth of the terms before
  for (int64_t term = 0; term < product.terms; ++term) {
    const int64_t depth = product.depths[term];
    for (int64_t from = 0; from < depth; from += kDepth) {
      const int64_t count = std::min(kDepth, depth - from);
      int64_t row_stride = 0, depth_stride = 0;
      for_dtype(product.a[term].dtype, [&](auto* tag) {
        pack_block<std::remove_pointer_t<decltype(tag)>>(product.a[term], row, rows, from, count, block, &row_stride,
                                                         &depth_stride);
      });
      const float* piece = panels + (done + from) * kPanel;
      if (started)
        multiply<true>(rows, columns, count, block, row_stride, depth_stride, piece, panel_stride, tile, kTileStride);
      else
        multiply<false>(rows, columns, count, block, row_stride, depth_stride, piece, panel_stride, tile, kTileStride);
      started = true;
    }
    done += depth;
  }
  if (!started) std::fill(tile, tile + kTileRows * kTileStride, 0.0f);
  store_tile_any(product, row, rows, column, columns, tile, kTileStride);
}

// Panels of [first, first + columns) of product's B, all terms below each other.
void pack_panels(const stoker_product_call& product, int64_t depth, int64_t first, int64_t panel, int64_t columns, float* packed) {
  float* to = packed + panel * kPanel * depth;
  const int64_t column = first + panel * kPanel, width = std::min<int64_t>(kPanel, first + columns - column);
  for (int64_t term = 0; term < product.terms; ++term) {
    for_dtype(product.b[term].dtype, [&](auto* tag) {
      pack_panel<std::remove_pointer_t<decltype(tag)>>(product.b[term], product.depths[term], column, width, to);
    });
    to += product.depths[term] * kPanel;
  }
}

void own_product(const stoker_product_call& product) {
  int64_t depth = 0;
  for (int64_t term = 0; term < product.terms; ++term) depth += product.depths[term];
  const int64_t widest = std::max<int64_t>(kTileColumns, kPackedFloats / std::max<int64_t>(depth, 1) / kTileColumns * kTileColumns);
  static thread_local Scratch shared;  // of the calling thread; not the one its own tiles use
  shared.reserve(round_up(std::min(widest, product.columns), kPanel) * std::max<int64_t>(depth, 1));
  float* packed = shared.take(0);
  const int64_t tile_rows = (product.rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < product.columns; first += widest) {
    const int64_t columns = std::min(widest, product.columns - first);
    const int64_t panels = (columns + kPanel - 1) / kPanel, tile_columns = (columns + kTileColumns - 1) / kTileColumns;
    parallel_tasks((panels + kBatch - 1) / kBatch, product.threads, [&](int64_t batch) {
      for (int64_t panel = batch * kBatch; panel < std::min(panels, (batch + 1) * kBatch); ++panel)
        pack_panels(product, depth, first, panel, columns, packed);
    });
    parallel_tasks(tile_rows * tile_columns, product.threads, [&](int64_t task) {
      const int64_t row = task / tile_columns * kTileRows, column = first + task % tile_columns * kTileColumns;
      own_tile(product, row, std::min(kTileRows, product.rows - row), column,
               std::min(kTileColumns, first + columns - column), packed, depth, first);
    });
  }
}

// --- OpenBLAS engine ----------------------------------------------------------------------------------------------------

constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;  // CBLAS

// A fp32 view of part of an operand: the memory itself, or a widened copy in `buffer`, with the same order of strides.
const float* widened(const stoker_operand& operand, int64_t row, int64_t rows, int64_t column, int64_t columns, float* buffer,
                     int64_t* stride) {
  const bool by_rows = operand.column_stride == 1;
  const int64_t outer_stride = by_rows ? operand.row_stride : operand.column_stride;
  const int64_t offset = by_rows ? row * outer_stride + column : column * outer_stride + row;
  if (operand.dtype == STOKER_FLOAT32) {
    *stride = outer_stride;
    return static_cast<const float*>(operand.data) + offset;
  }
  const int64_t outer = by_rows ? rows : columns, inner = by_rows ? columns : rows;
  const bf16* data = static_cast<const bf16*>(operand.data) + offset;
  for (int64_t i = 0; i < outer; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < inner; ++j) buffer[i * inner + j] = load(data[i * outer_stride + j]);
  }
  *stride = inner;
  return buffer;
}

void openblas_product(const stoker_product_call& product) {
  const Sgemm sgemm = reinterpret_cast<Sgemm>(const_cast<void*>(product.sgemm));
  // Large enough that OpenBLAS's own packing disappears, small enough for two dozen tiles in a 2048 x 768 result.
  constexpr int64_t kRowsPerCall = 256, kColumnsPerCall = 384;
  int64_t deepest = 1;
  for (int64_t term = 0; term < product.terms; ++term) deepest = std::max(deepest, product.depths[term]);
  const int64_t tile_rows = (product.rows + kRowsPerCall - 1) / kRowsPerCall;
  const int64_t tile_columns = (product.columns + kColumnsPerCall - 1) / kColumnsPerCall;
  parallel_tasks(tile_rows * tile_columns, product.threads, [&](int64_t task) {
    const int64_t row = task / tile_columns * kRowsPerCall, column = task % tile_columns * kColumnsPerCall;
    const int64_t rows = std::min(kRowsPerCall, product.rows - row), columns = std::min(kColumnsPerCall, product.columns - column);
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(kRowsPerCall * kColumnsPerCall + (kRowsPerCall + kColumnsPerCall) * deepest + 64);
    float* tile = scratch.take(kRowsPerCall * kColumnsPerCall);
    float* a_buffer = scratch.take(kRowsPerCall * deepest);
    float* b_buffer = scratch.take(kColumnsPerCall * deepest);
    // Without bias and rounding the result can go straight to its place.
    const bool direct = product.c_dtype == STOKER_FLOAT32 && !product.bias;
    float* c = direct ? static_cast<float*>(product.c) + row * product.c_stride + column : tile;
    const int64_t c_stride = direct ? product.c_stride : kColumnsPerCall;
    float beta = 0.0f;
    for (int64_t term = 0; term < product.terms; ++term) {
      int64_t a_stride, b_stride;
      const int64_t depth = product.depths[term];
      const float* a = widened(product.a[term], row, rows, 0, depth, a_buffer, &a_stride);
      const float* b = widened(product.b[term], 0, depth, column, columns, b_buffer, &b_stride);
      sgemm(kRowMajor, product.a[term].column_stride == 1 ? kNoTranspose : kTranspose,
            product.b[term].column_stride == 1 ? kNoTranspose : kTranspose, static_cast<int>(rows), static_cast<int>(columns),
            static_cast<int>(depth), 1.0f, a, static_cast<int>(a_stride), b, static_cast<int>(b_stride), beta, c,
            static_cast<int>(c_stride));
      beta = 1.0f;
    }
    if (!direct) store_tile_any(product, row, rows, column, columns, tile, kColumnsPerCall);
  });
}

}  // namespace

// Sums of the columns of a (rows x columns) matrix: blocks of 256 rows by 64 columns, then the blocks of a column in order.
template <typename Scalar>
static void column_sums(const Scalar* x, int64_t row_stride, int64_t rows, int64_t columns, float* sums, int threads) {
  parallel_tasks((columns + 63) / 64, threads_for(rows * columns, threads), [&](int64_t task) {
    const int64_t first = task * 64, width = std::min<int64_t>(64, columns - first);
    float total[64] = {};
    for (int64_t begin = 0; begin < rows; begin += 256) {
      float part[64] = {};
      for (int64_t i = begin; i < std::min(rows, begin + 256); ++i) {
        const Scalar* row = x + i * row_stride + first;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) part[j] += load(row[j]);
      }
      for (int64_t j = 0; j < width; ++j) total[j] += part[j];
    }
    std::copy(total, total + width, sums + first);
  });
}

}  // namespace stoker

STOKER_API int32_t stoker_product(const stoker_product_call* call) {
  using namespace stoker;
  return guarded([&] {
    if (call->rows == 0 || call->columns == 0) return;
    if (call->sgemm)
      openblas_product(*call);
    else
      own_product(*call);
  });
}

STOKER_API int32_t stoker_column_sums(const void* x, int64_t row_stride, int64_t rows, int64_t columns, float* sums,
                                      int32_t dtype, int32_t threads) {
  using namespace stoker;
  return guarded([&] {
    for_dtype(dtype, [&](auto* tag) {
      column_sums(static_cast<const std::remove_pointer_t<decltype(tag)>*>(x), row_stride, rows, columns, sums, threads);
    });
  });
}
