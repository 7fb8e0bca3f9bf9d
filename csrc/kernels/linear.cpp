// Products of the linear layers, Y = X W^T + b, dX = dY W, dW = dY^T X, db = column sums of dY.
//
// B is packed into panels, and tiles of the result are handed out to the threads; the sums of a tile stay in cache and leave it
// with bias and rounding applied. What multiplies a tile is in kernels/product_tiles.h.
//   many rows: all threads pack B together, then tiles of 96 rows by 768 columns read the panels several times.
//   few rows:  panels are read so few times that storing them for all threads costs more than the product (a vocabulary's head
//              on 64 rows); each thread packs the columns of its own tile, a piece at a time that stays in its cache.
// Each number of the result is summed by one thread in the same order of the depth whichever way is taken: results depend
// neither on the thread count nor on the tiles.
#include <algorithm>
#include <vector>

#include "core/gemm.h"
#include "core/parallel.h"
#include "core/types.h"
#include "kernels/product_tiles.h"

namespace stoker {

namespace {

// The sums of a tile, 300 KB, and the rows of A that it reads stay in the L2 cache.
constexpr int64_t kTileColumns = 768;
constexpr int64_t kTileStride = kTileColumns + 16;
constexpr int64_t kPackedBytes = 16 << 20;  // B is packed in pieces of at most this size, for the last-level cache's sake
constexpr int64_t kFewRows = 256;
constexpr int64_t kStripe = 128;  // columns packed by a thread at a time
constexpr int64_t kStripeStride = kStripe + 16;

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

template <typename Tiles>
class Product {
 public:
  using Element = typename Tiles::Element;

  explicit Product(const stoker_product_call& call) : call_(call), tiles_(call) {
    for_pieces([&](int64_t, int64_t, int64_t count, int64_t) { depth_ += Tiles::padded_depth(count); });
  }

  void run() const {
    if (call_.rows <= kFewRows)
      few_rows();
    else
      many_rows();
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(Element);

  // Elements from one panel to the next. Panels a power of two apart would share the same few cache lines.
  static int64_t panel_stride(int64_t depth) { return Tiles::kWidth * depth + kLine; }

  // Elements as the floats that scratch memory is counted in.
  static int64_t floats(int64_t elements) { return (elements * static_cast<int64_t>(sizeof(Element)) + 3) / 4; }
  static Element* take(Scratch& scratch, int64_t elements) { return reinterpret_cast<Element*>(scratch.take(floats(elements))); }

  // f(term, from, count, before) for the pieces of the depth in the order in which they are summed; `before` is the depth of all
  // pieces before this one.
  template <typename F>
  void for_pieces(F&& f) const {
    int64_t before = 0;
    for (int64_t term = 0; term < call_.terms; ++term) {
      for (int64_t from = 0; from < call_.depths[term]; from += Tiles::kDepth) {
        const int64_t count = std::min(Tiles::kDepth, call_.depths[term] - from);
        f(term, from, count, before);
        before += Tiles::padded_depth(count);
      }
    }
  }

  void few_rows() const {
    const int64_t height = Tiles::padded_rows(call_.rows), stride = panel_stride(Tiles::kDepth);
    parallel_tasks((call_.columns + kStripe - 1) / kStripe, call_.threads, [&](int64_t task) {
      const int64_t column = task * kStripe, columns = std::min(kStripe, call_.columns - column);
      Scratch& scratch = Scratch::of_this_thread();
      const int64_t block_size = kTileRows * Tiles::kDepth, panel_size = kStripe / Tiles::kWidth * stride;
      scratch.reserve(height * kStripeStride + floats(block_size) + floats(panel_size) + 64);
      float* tile = scratch.take(height * kStripeStride);
      Element* block = take(scratch, block_size);
      Element* panels = take(scratch, panel_size);
      for_pieces([&](int64_t term, int64_t from, int64_t count, int64_t before) {
        tiles_.pack(call_.b[term], from, count, column, columns, panels, stride);
        for (int64_t row = 0; row < call_.rows; row += kTileRows)
          tiles_.sum(call_.a[term], from, count, before == 0, row, std::min(kTileRows, call_.rows - row), columns, panels, stride,
                     block, tile + row * kStripeStride, kStripeStride);
      });
      tiles_.release();
      store_tile_any(call_, 0, call_.rows, column, columns, tile, kStripeStride);
    });
  }

  void many_rows() const {
    const int64_t fitting = kPackedBytes / static_cast<int64_t>(sizeof(Element)) / depth_;
    const int64_t widest = std::max(kTileColumns, fitting / kTileColumns * kTileColumns);
    static thread_local Scratch shared;  // of the calling thread; not the one its own tiles use
    const int64_t panels = (std::min(widest, call_.columns) + Tiles::kWidth - 1) / Tiles::kWidth;
    shared.reserve(floats(panels * panel_stride(depth_)));
    Element* packed = take(shared, 0);
    for (int64_t first = 0; first < call_.columns; first += widest) {
      const int64_t columns = std::min(widest, call_.columns - first);
      pack(first, columns, packed);
      tiles_of(first, columns, packed);
    }
  }

  // Columns [first, first + columns) of B as panels, by all threads.
  void pack(int64_t first, int64_t columns, Element* packed) const {
    const int64_t stride = panel_stride(depth_);
    parallel_tasks((columns + kStripe - 1) / kStripe, call_.threads, [&](int64_t task) {
      const int64_t column = task * kStripe;
      for_pieces([&](int64_t term, int64_t from, int64_t count, int64_t before) {
        tiles_.pack(call_.b[term], from, count, first + column, std::min(kStripe, columns - column),
                    packed + column / Tiles::kWidth * stride + before * Tiles::kWidth, stride);
      });
    });
  }

  // The result's columns [first, first + columns), whose panels are `packed`. A product with few tiles gets narrower ones, so that
  // every thread has work until the end.
  void tiles_of(int64_t first, int64_t columns, const Element* packed) const {
    const int64_t tile_rows = (call_.rows + kTileRows - 1) / kTileRows;
    int64_t width = kTileColumns;
    while (width > kNarrowest && tile_rows * ((columns + width - 1) / width) < kTilesPerThread * call_.threads) width /= 2;
    const int64_t tile_columns = (columns + width - 1) / width;
    parallel_tasks(tile_rows * tile_columns, call_.threads, [&](int64_t task) {
      const int64_t row = task / tile_columns * kTileRows, column = task % tile_columns * width;
      tile(row, std::min(kTileRows, call_.rows - row), first + column, std::min(width, columns - column),
           packed + column / Tiles::kWidth * panel_stride(depth_));
    });
  }

  void tile(int64_t row, int64_t rows, int64_t column, int64_t columns, const Element* panels) const {
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(kTileRows * kTileStride + floats(kTileRows * Tiles::kDepth) + 64);
    float* sums = scratch.take(kTileRows * kTileStride);
    Element* block = take(scratch, kTileRows * Tiles::kDepth);
    for_pieces([&](int64_t term, int64_t from, int64_t count, int64_t before) {
      tiles_.sum(call_.a[term], from, count, before == 0, row, rows, columns, panels + before * Tiles::kWidth, panel_stride(depth_),
                 block, sums, kTileStride);
    });
    tiles_.release();
    store_tile_any(call_, row, rows, column, columns, sums, kTileStride);
  }

  static constexpr int64_t kNarrowest = 192, kTilesPerThread = 4;

  const stoker_product_call& call_;
  const Tiles tiles_;
  int64_t depth_ = 0;
};

// Without depth the result is the bias.
void no_depth(const stoker_product_call& product) {
  const std::vector<float> zeros(product.columns);
  for (int64_t row = 0; row < product.rows; ++row) store_tile_any(product, row, 1, 0, product.columns, zeros.data(), 0);
}

}  // namespace

// Sums of the columns of a (rows x columns) matrix: blocks of 256 rows by 64 columns, then the blocks of a column in order.
template <typename Scalar, typename Sum>
static void column_sums(const Scalar* x, int64_t row_stride, int64_t rows, int64_t columns, Sum* sums, int threads) {
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
    for (int64_t j = 0; j < width; ++j) store(sums + first + j, total[j]);
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
    else if (!call->microkernel)
      Product<RegisterTiles>(*call).run();
    else
      for_dtype(call->a->dtype, [&](auto* tag) { Product<Microkernel<std::remove_pointer_t<decltype(tag)>>>(*call).run(); });
  });
}

STOKER_API int32_t stoker_column_sums(const stoker_column_sums_call* call) {
  using namespace stoker;
  return guarded([&] {
    for_dtype(call->dtype, [&](auto* tag) {
      for_dtype(call->sums_dtype, [&](auto* sums) {
        column_sums(static_cast<const std::remove_pointer_t<decltype(tag)>*>(call->x), call->row_stride, call->rows, call->columns,
                    static_cast<decltype(sums)>(call->sums), call->threads);
      });
    });
  });
}
