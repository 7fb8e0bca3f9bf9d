// Products of the linear layers, Y = X W^T + b, dX = dY W, dW = dY^T X, db = column sums of dY.
//
// B is packed into panels, and tiles of the result are handed out to the threads; the sums of a tile stay in cache and leave it
// with bias and rounding applied. What multiplies a tile is in kernels/product_tiles.h.
//   many rows: all threads pack B together, then tiles of 96 rows by 768 columns, or smaller ones where threads are many, read the
//              panels several times.
//   few rows:  panels are read so few times that storing them for all threads costs more than the product (a vocabulary's head
//              on 64 rows); each thread packs the columns of its own tile, a piece at a time that stays in its cache. Only where
//              there are columns enough for all threads.
//   few rows and columns of a great depth (gradients of LoRA's A): the depth is cut into at most eight parts, each a task as above;
//              the parts are added in their order.
// Which products are cut in depth depends on their shape alone. In all others, each number of the result is summed by one thread in
// the same order of the depth whichever way is taken: results depend neither on the thread count nor on the tiles.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/buffer.h"
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
constexpr int64_t kStripesPerThread = 2;  // fewer cannot keep all threads busy
constexpr int64_t kMostParts = 8, kGreatDepth = 1024, kSmallResult = 1 << 18;
constexpr int64_t kStep = 16;  // of the depth, in packing: whole squares of transposes
constexpr int64_t kPackingWork = 2;  // an element takes so much longer than one of a cheap operator (0.27 ns, Zen 5)

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

struct TileShape {
  int64_t rows, columns;
};

template <typename Tiles>
class Product {
 public:
  using Element = typename Tiles::Element;

  explicit Product(const stoker_product_call& call) : call_(call), tiles_(call) {
    for (int64_t term = 0; term < call.terms; ++term) depth_ += call.depths[term];
    cuts_depth_ = call.rows <= kFewRows && call.rows * call.columns <= kSmallResult && depth_ >= kGreatDepth;
    if (cuts_depth_ && depth_ < kMostParts * Tiles::kDepth) piece_ = std::min<int64_t>(Tiles::kDepth, 256);
    depth_ = 0;
    for_pieces([&](int64_t, int64_t, int64_t count, int64_t) {
      pieces_ += 1;
      depth_ += Tiles::padded_depth(count);
      steps_ += (count + kStep - 1) / kStep;
    });
  }

  void run() const {
    if (cuts_depth_)
      parts_of_depth();
    else if (call_.rows <= kFewRows && (call_.columns + kStripe - 1) / kStripe >= kStripesPerThread * call_.threads)
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
      for (int64_t from = 0; from < call_.depths[term]; from += piece_) {
        const int64_t count = std::min(piece_, call_.depths[term] - from);
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
        tiles_.pack(call_.b[term], from, count, Tiles::padded_depth(count), column, columns, panels, stride);
        for (int64_t row = 0; row < call_.rows; row += kTileRows)
          tiles_.sum(call_.a[term], from, count, before == 0, row, std::min(kTileRows, call_.rows - row), columns, panels, stride,
                     block, tile + row * kStripeStride, kStripeStride);
      });
      tiles_.release();
      store_tile_any(call_, 0, call_.rows, column, columns, tile, kStripeStride);
    });
  }

  void parts_of_depth() const {
    const int64_t height = Tiles::padded_rows(call_.rows), panel = panel_stride(Tiles::kDepth), parts = std::min(kMostParts, pieces_);
    const bool is_narrow = (call_.columns + kStripe - 1) / kStripe * parts < 2 * kStripesPerThread * call_.threads;
    const int64_t width = is_narrow ? kStripe / 2 : kStripe, stride = width + 16, stripes = (call_.columns + width - 1) / width;
    const Buffer<float> tiles(stripes * parts * height * stride);
    std::vector<std::atomic<int64_t>> unfinished(stripes);
    for (auto& count : unfinished) count.store(parts, std::memory_order_relaxed);
    parallel_tasks(stripes * parts, call_.threads, [&](int64_t task) {
      const int64_t stripe = task / parts, part = task % parts, column = stripe * width;
      const int64_t columns = std::min(width, call_.columns - column);
      Scratch& scratch = Scratch::of_this_thread();
      const int64_t block_size = kTileRows * Tiles::kDepth, panel_size = width / Tiles::kWidth * panel;
      scratch.reserve(floats(block_size) + floats(panel_size) + 64);
      Element* block = take(scratch, block_size);
      Element* panels = take(scratch, panel_size);
      float* tile = tiles.get() + task * height * stride;
      int64_t piece = 0;
      const int64_t first = pieces_ * part / parts, last = pieces_ * (part + 1) / parts;
      for_pieces([&](int64_t term, int64_t from, int64_t count, int64_t) {
        const int64_t number = piece++;
        if (number < first || number >= last) return;
        tiles_.pack(call_.b[term], from, count, Tiles::padded_depth(count), column, columns, panels, panel);
        for (int64_t row = 0; row < call_.rows; row += kTileRows)
          tiles_.sum(call_.a[term], from, count, number == first, row, std::min(kTileRows, call_.rows - row), columns, panels, panel,
                     block, tile + row * stride, stride);
      });
      tiles_.release();
      if (unfinished[stripe].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      float* total = tiles.get() + stripe * parts * height * stride;
      for (int64_t other = 1; other < parts; ++other)
        for (int64_t row = 0; row < call_.rows; ++row) {
          float* to = total + row * stride;
          const float* from = to + other * height * stride;
#pragma omp simd
          for (int64_t i = 0; i < columns; ++i) to[i] += from[i];
        }
      store_tile_any(call_, 0, call_.rows, column, columns, total, stride);
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

  // Columns [first, first + columns) of B as panels, by all threads: each packs some steps of the depth in some stripes.
  void pack(int64_t first, int64_t columns, Element* packed) const {
    const int64_t stride = panel_stride(depth_), stripes = (columns + kStripe - 1) / kStripe;
    const int threads = threads_for(kPackingWork * columns * depth_, call_.threads);
    parallel_ranges(stripes * steps_, threads, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t column = begin / steps_ * kStripe, step = begin % steps_, last = std::min(steps_, step + end - begin);
        int64_t passed = 0;
        for_pieces([&](int64_t term, int64_t from, int64_t count, int64_t before) {
          const int64_t low = std::max<int64_t>(0, step - passed) * kStep, high = std::min(count, (last - passed) * kStep);
          passed += (count + kStep - 1) / kStep;
          if (low >= high) return;
          const int64_t padded = high == count ? Tiles::padded_depth(count) : high;
          tiles_.pack(call_.b[term], from + low, high - low, padded - low, first + column, std::min(kStripe, columns - column),
                      packed + column / Tiles::kWidth * stride + (before + low) * Tiles::kWidth, stride);
        });
        begin += last - step;
      }
    });
  }

  // The result's columns [first, first + columns), whose panels are `packed`.
  void tiles_of(int64_t first, int64_t columns, const Element* packed) const {
    const TileShape shape = tile_shape(columns);
    const int64_t tile_rows = (call_.rows + shape.rows - 1) / shape.rows;
    const int64_t tile_columns = (columns + shape.columns - 1) / shape.columns;
    parallel_tasks(tile_rows * tile_columns, call_.threads, [&](int64_t task) {
      const int64_t row = task / tile_columns * shape.rows, column = task % tile_columns * shape.columns;
      tile(row, std::min(shape.rows, call_.rows - row), first + column, std::min(shape.columns, columns - column),
           packed + column / Tiles::kWidth * panel_stride(depth_));
    });
  }

  // The tiles with which the threads are done first. A wide tile packs its rows of A less often, a high one reads the panels less
  // often, and the fewer tiles each thread gets, the longer threads wait for the last one.
  TileShape tile_shape(int64_t columns) const {
    TileShape best{kTileRows, kTileColumns};
    const int64_t packed = call_.a[0].column_stride == 1 ? Tiles::kPackingRows : kPackingColumns;
    const bool is_cached = columns * depth_ * static_cast<int64_t>(sizeof(Element)) <= kPackedBytes;
    const int64_t reread = is_cached ? Tiles::kRereading : kRereadingMemory;
    double least = std::numeric_limits<double>::infinity();
    bool most_wait = true;  // until a shape is found that has enough tiles
    for (const int64_t height : Tiles::kHeights)
      for (const int64_t width : {768, 576, 384, 320, 256, 192, 128, 64}) {
        const int64_t tasks = ((call_.rows + height - 1) / height) * ((columns + width - 1) / width);
        const double rounds = static_cast<double>((tasks + call_.threads - 1) / call_.threads) + kUneven;
        const int64_t elements = (std::min(width, columns) + packed) * (std::min(height, call_.rows) + reread);
        const double size = static_cast<double>(elements) + kHandingOut / static_cast<double>(depth_);
        const bool too_few = tasks < kTilesPerThread * call_.threads;
        if (too_few > most_wait || (too_few == most_wait && rounds * size >= kWorthIt * least)) continue;
        most_wait = too_few;
        least = rounds * size;
        best = {height, width};
      }
    return best;
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

  // In columns of a tile: the time to pack A if it lies in memory by columns. Measured with 2,000 x 768 x 768, one thread of a
  // Zen 5 with AVX-512.
  static constexpr int64_t kPackingColumns = 25;
  static constexpr int64_t kRereadingMemory = 48;  // in rows: to read B where it is in no cache; 10 GB/s for each thread
  static constexpr int64_t kTilesPerThread = 2;
  static constexpr double kUneven = 0.3;      // of a tile: how much later the slowest thread is done with its last one
  static constexpr double kWorthIt = 0.995;   // smaller tiles must be faster by this factor
  static constexpr double kHandingOut = 1e5;  // multiplications in the time that it takes to get a tile, about a microsecond

  const stoker_product_call& call_;
  const Tiles tiles_;
  int64_t piece_ = Tiles::kDepth, pieces_ = 0;  // the most of the depth that is summed at once, and how often
  int64_t depth_ = 0, steps_ = 0;
  bool cuts_depth_ = false;
};

// Without depth the result is the bias.
void no_depth(const stoker_product_call& product) {
  const std::vector<float> zeros(product.columns);
  for (int64_t row = 0; row < product.rows; ++row) store_tile_any(product, row, 1, 0, product.columns, zeros.data(), 0);
}

}  // namespace

// Sums of the columns of a (rows x columns) matrix: blocks of 64 rows by 64 columns, then the blocks of a column in order. Threads
// get ranges of blocks, column by column; who does the last block of a column adds its blocks up.
template <typename Scalar, typename Sum>
static void column_sums(const Scalar* x, int64_t row_stride, int64_t rows, int64_t columns, Sum* sums, int threads) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = std::max<int64_t>(1, (rows + kBlock - 1) / kBlock), stripes = (columns + kBlock - 1) / kBlock;
  const Buffer<float> parts(stripes * blocks * kBlock);
  std::vector<std::atomic<int64_t>> open(stripes);
  for (auto& count : open) count.store(blocks, std::memory_order_relaxed);
  const auto sum_block = [&](int64_t stripe, int64_t block) {
    const int64_t first = stripe * kBlock, width = std::min(kBlock, columns - first);
    float part[kBlock] = {};
    for (int64_t i = block * kBlock; i < std::min(rows, (block + 1) * kBlock); ++i) {
      const Scalar* row = x + i * row_stride + first;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) part[j] += load(row[j]);
    }
    std::copy(part, part + kBlock, parts.get() + (stripe * blocks + block) * kBlock);
  };
  parallel_ranges(stripes * blocks, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t stripe = begin / blocks, count = std::min(end - begin, (stripe + 1) * blocks - begin);
      for (int64_t block = begin % blocks; block < begin % blocks + count; ++block) sum_block(stripe, block);
      begin += count;
      if (open[stripe].fetch_sub(count, std::memory_order_acq_rel) != count) continue;
      float total[kBlock] = {};
      for (int64_t block = 0; block < blocks; ++block) {
        const float* part = parts.get() + (stripe * blocks + block) * kBlock;
        for (int64_t j = 0; j < kBlock; ++j) total[j] += part[j];
      }
      const int64_t first = stripe * kBlock;
      for (int64_t j = 0; j < std::min(kBlock, columns - first); ++j) store(sums + first + j, total[j]);
    }
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
