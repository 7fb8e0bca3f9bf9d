// Products of the linear layers, Y = X W^T + b, dX = dY W, dW = dY^T X, db = column sums of dY.
//
// B is packed into panels, and tiles of the result are handed out to the threads; the sums of a tile stay in cache and leave it
// with bias and rounding applied. Operands in bf16 are widened as they are packed.
//   many rows: all threads pack B together, then tiles of 96 rows by 384 columns read the panels several times.
//   few rows:  panels are read so few times that storing them for all threads costs more than the product (a vocabulary's head
//              on 64 rows); each thread packs the columns of its own tile, a piece at a time that stays in its cache.
// Each number of the result is summed by one thread in the same order of the depth whichever way is taken: results depend
// neither on the thread count nor on the tiles.
#include <algorithm>
#include <vector>

#include "core/gemm.h"
#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

namespace {

constexpr int64_t kTileRows = 96, kTileColumns = 384;
constexpr int64_t kDepth = 256;  // a panel of B of this depth is 16 KB on AVX2 and stays in L1 while the tile's rows pass by
constexpr int64_t kTileStride = kTileColumns + 16;
constexpr int64_t kPackedFloats = 4 << 20;  // B is packed in pieces of at most 16 MB, for the last-level cache's sake
constexpr int64_t kFewRows = 256;
constexpr int64_t kAhead = 8;  // rows of B that are fetched ahead: a row is too short for the CPU's own prefetching to start
constexpr int64_t kStripe = 128;  // columns packed by a thread at a time: kDepth deep, they take 128 KB of the L2 cache
constexpr int64_t kStripeStride = kStripe + 16;
constexpr int64_t kPanelStride = kPanel * kDepth + 16;  // panels a power of two apart would share the same few cache lines

// Columns [first, first + columns) and depth [from, from + count) of B as panels, panel_stride floats apart.
void pack_panels(const stoker_operand& b, int64_t from, int64_t count, int64_t first, int64_t columns, float* panels,
                 int64_t panel_stride) {
  for_dtype(b.dtype, [&](auto* tag) {
    const auto* data = static_cast<const std::remove_pointer_t<decltype(tag)>*>(b.data);
    data += from * b.row_stride + first * b.column_stride;
    if (b.column_stride == 1) {
      // Row by row through all panels: memory is read in order.
      for (int64_t p = 0; p < count; ++p)
        for (int64_t j = 0; j < columns; j += kPanel) {
          __builtin_prefetch(data + (p + kAhead) * b.row_stride + j);
          pack_row(data + p * b.row_stride + j, std::min<int64_t>(kPanel, columns - j),
                   panels + j / kPanel * panel_stride + p * kPanel);
        }
    } else {
      for (int64_t j = 0; j < columns; j += kPanel)
        pack_columns(data + j * b.column_stride, b.column_stride, count, std::min<int64_t>(kPanel, columns - j),
                     panels + j / kPanel * panel_stride);
    }
  });
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

// A finished tile of fp32 sums into C, with the bias, and with what is there already if the call accumulates.
template <typename Scalar, typename Bias>
void store_tile(const stoker_product_call& product, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* tile,
                int64_t tile_stride) {
  const Bias* bias = static_cast<const Bias*>(product.bias);
  for (int64_t i = 0; i < rows; ++i) {
    Scalar* to = static_cast<Scalar*>(product.c) + (row + i) * product.c_stride + column;
    const float* from = tile + i * tile_stride;
    const auto each = [&](auto&& value) {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) store(to + j, value(j));
    };
    if (bias && product.accumulate)
      each([&](int64_t j) { return load(to[j]) + (from[j] + load(bias[column + j])); });
    else if (bias)
      each([&](int64_t j) { return from[j] + load(bias[column + j]); });
    else if (product.accumulate)
      each([&](int64_t j) { return load(to[j]) + from[j]; });
    else
      each([&](int64_t j) { return from[j]; });
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

// f(term, from, count, before) for the pieces of the depth in the order in which they are summed; `before` is the depth of all
// pieces before this one.
template <typename F>
void for_pieces(const stoker_product_call& product, F&& f) {
  int64_t before = 0;
  for (int64_t term = 0; term < product.terms; ++term) {
    for (int64_t from = 0; from < product.depths[term]; from += kDepth) {
      const int64_t count = std::min(kDepth, product.depths[term] - from);
      f(term, from, count, before);
      before += count;
    }
  }
}

// One piece of the depth into the sums of a tile: the first starts them. `panels` are B's, `block` is scratch for A's rows.
void sum_piece(const stoker_operand& a, int64_t from, int64_t count, bool first, int64_t row, int64_t rows, int64_t columns,
               const float* panels, int64_t panel_stride, float* block, float* tile, int64_t tile_stride) {
  int64_t row_stride = 0, depth_stride = 0;
  for_dtype(a.dtype, [&](auto* tag) {
    pack_block<std::remove_pointer_t<decltype(tag)>>(a, row, rows, from, count, block, &row_stride, &depth_stride);
  });
  const auto sum = first ? multiply<false> : multiply<true>;
  sum(rows, columns, count, block, row_stride, depth_stride, panels, panel_stride, tile, tile_stride);
}

// --- Few rows: each task packs its own columns of B ------------------------------------------------------------------------

void few_rows(const stoker_product_call& product) {
  parallel_tasks((product.columns + kStripe - 1) / kStripe, product.threads, [&](int64_t task) {
    const int64_t column = task * kStripe, columns = std::min(kStripe, product.columns - column);
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(product.rows * kStripeStride + kTileRows * kDepth + kStripe / kPanel * kPanelStride + 64);
    float* tile = scratch.take(product.rows * kStripeStride);
    float* block = scratch.take(kTileRows * kDepth);
    float* panels = scratch.take(kStripe / kPanel * kPanelStride);
    for_pieces(product, [&](int64_t term, int64_t from, int64_t count, int64_t before) {
      pack_panels(product.b[term], from, count, column, columns, panels, kPanelStride);
      for (int64_t row = 0; row < product.rows; row += kTileRows)
        sum_piece(product.a[term], from, count, before == 0, row, std::min(kTileRows, product.rows - row), columns, panels,
                  kPanelStride, block, tile + row * kStripeStride, kStripeStride);
    });
    store_tile_any(product, 0, product.rows, column, columns, tile, kStripeStride);
  });
}

// --- Many rows: all threads pack B together ----------------------------------------------------------------------------------

void large_tile(const stoker_product_call& product, int64_t row, int64_t rows, int64_t column, int64_t columns,
                const float* panels, int64_t panel_stride) {
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve(kTileRows * (kTileStride + kDepth) + 64);
  float* tile = scratch.take(kTileRows * kTileStride);
  float* block = scratch.take(kTileRows * kDepth);
  for_pieces(product, [&](int64_t term, int64_t from, int64_t count, int64_t before) {
    sum_piece(product.a[term], from, count, before == 0, row, rows, columns, panels + before * kPanel, panel_stride, block, tile,
              kTileStride);
  });
  store_tile_any(product, row, rows, column, columns, tile, kTileStride);
}

void many_rows(const stoker_product_call& product, int64_t depth) {
  const int64_t widest = std::max<int64_t>(kTileColumns, kPackedFloats / depth / kTileColumns * kTileColumns);
  static thread_local Scratch shared;  // of the calling thread; not the one its own tiles use
  const int64_t panel_stride = kPanel * depth + 16;  // see kPanelStride
  shared.reserve(round_up(std::min(widest, product.columns), kPanel) / kPanel * panel_stride);
  float* packed = shared.take(0);
  const int64_t tile_rows = (product.rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < product.columns; first += widest) {
    const int64_t columns = std::min(widest, product.columns - first);
    const int64_t tile_columns = (columns + kTileColumns - 1) / kTileColumns;
    parallel_tasks((columns + kStripe - 1) / kStripe, product.threads, [&](int64_t task) {
      const int64_t column = task * kStripe;
      for_pieces(product, [&](int64_t term, int64_t from, int64_t count, int64_t before) {
        pack_panels(product.b[term], from, count, first + column, std::min(kStripe, columns - column),
                    packed + column / kPanel * panel_stride + before * kPanel, panel_stride);
      });
    });
    parallel_tasks(tile_rows * tile_columns, product.threads, [&](int64_t task) {
      const int64_t row = task / tile_columns * kTileRows, column = task % tile_columns * kTileColumns;
      large_tile(product, row, std::min(kTileRows, product.rows - row), first + column,
                 std::min(kTileColumns, columns - column), packed + column / kPanel * panel_stride, panel_stride);
    });
  }
}

// Without depth the result is the bias.
void no_depth(const stoker_product_call& product) {
  const std::vector<float> zeros(product.columns);
  for (int64_t row = 0; row < product.rows; ++row) store_tile_any(product, row, 1, 0, product.columns, zeros.data(), 0);
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
    int64_t depth = 0;
    for (int64_t term = 0; term < call->terms; ++term) depth += call->depths[term];
    if (depth == 0)
      no_depth(*call);
    else if (call->rows <= kFewRows)
      few_rows(*call);
    else
      many_rows(*call, depth);
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
