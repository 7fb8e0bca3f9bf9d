// What multiplies the tiles of a product (kernels/linear.cpp): the register tiles of core/gemm.h, or a function with the arguments
// of at::native::cpublas::brgemm, which is oneDNN's generated code inside libtorch.
//
// Each way packs the operands as it reads them. A piece of B becomes panels of kWidth columns, a piece of A a block of at most
// kTileRows rows; the depth of a piece is at most kDepth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/gemm.h"
#include "core/types.h"

namespace stoker {

constexpr int64_t kTileRows = 96;

// The matrix element (0, 0) of what an operand has from (row, column) on.
template <typename Scalar>
inline const Scalar* at(const stoker_operand& operand, int64_t row, int64_t column) {
  return static_cast<const Scalar*>(operand.data) + row * operand.row_stride + column * operand.column_stride;
}

// --- Register tiles -------------------------------------------------------------------------------------------------------

class RegisterTiles {
 public:
  using Element = float;  // of packed operands; bf16 is widened
  static constexpr int64_t kWidth = kPanel;
  static constexpr int64_t kHeights[] = {96, 72, 48, 36, 24};  // of tiles: multiples of kRows
  // What a tile costs beside its arithmetic: to pack A, in columns, and to read B, in rows. Measured as in kernels/linear.cpp.
  static constexpr int64_t kPackingRows = 9, kRereading = 3;
  static constexpr int64_t kDepth = 256;  // a panel of B of this depth is 16 KB on AVX2 and stays in L1 while the tile's rows pass by

  explicit RegisterTiles(const stoker_product_call&) {}
  static int64_t padded_depth(int64_t depth) { return depth; }
  static int64_t padded_rows(int64_t rows) { return rows; }

  // Columns [first, first + columns) and depth [from, from + count) of B as panels, panel_stride elements apart.
  void pack(const stoker_operand& b, int64_t from, int64_t count, int64_t /* padded */, int64_t first, int64_t columns,
            float* panels, int64_t panel_stride) const {
    for_dtype(b.dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      const Scalar* data = at<Scalar>(b, from, first);
      if (b.column_stride == 1) {
        // Row by row through all panels: memory is read in order.
        for (int64_t p = 0; p < count; ++p)
          for (int64_t j = 0; j < columns; j += kPanel) {
            __builtin_prefetch(data + (p + kAhead) * b.row_stride + j);
            pack_row(data + p * b.row_stride + j, columns - j, panels + j / kPanel * panel_stride + p * kPanel);
          }
      } else {
        for (int64_t j = 0; j < columns; j += kPanel)
          pack_columns(data + j * b.column_stride, b.column_stride, count, std::min<int64_t>(kPanel, columns - j),
                       panels + j / kPanel * panel_stride);
      }
    });
  }

  // One piece of the depth into the sums of a tile; the first piece starts them. `block` is scratch for A's rows.
  void sum(const stoker_operand& a, int64_t from, int64_t count, bool first, int64_t row, int64_t rows, int64_t columns,
           const float* panels, int64_t panel_stride, float* block, float* tile, int64_t tile_stride) const {
    for_dtype(a.dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      if (a.column_stride == 1)
        pack_rows_of_a(at<Scalar>(a, row, from), a.row_stride, rows, count, block);
      else
        pack_columns_of_a(at<Scalar>(a, row, from), a.column_stride, rows, count, block);
    });
    for_flag(first, [&](auto starts) {
      for_flag(a.column_stride == 1, [&](auto by_rows) {
        sum_block<!decltype(starts)::value, decltype(by_rows)::value>(rows, columns, count, block, panels, panel_stride, tile,
                                                                      tile_stride);
      });
    });
  }

  void release() const {}

 private:
  static constexpr int64_t kAhead = 8;  // rows of B fetched ahead: a row is too short for the CPU's own prefetching to start

  // Rows of A stay rows, kDepth apart.
  template <typename Scalar>
  static void pack_rows_of_a(const Scalar* from, int64_t stride, int64_t rows, int64_t count, float* to) {
    for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd
      for (int64_t p = 0; p < count; ++p) to[i * kDepth + p] = load(from[i * stride + p]);
    }
  }

  // A is in memory by columns: kRows numbers of a column side by side, so that a register tile reads its rows in order.
  template <typename Scalar>
  static void pack_columns_of_a(const Scalar* from, int64_t stride, int64_t rows, int64_t count, float* to) {
    const int64_t whole = rows / kRows * kRows;
    for (int64_t p = 0; p < count; ++p) {
      const Scalar* source = from + p * stride;
      float* slot = to + p * kRows;
      for (int64_t i = 0; i < whole; i += kRows, source += kRows, slot += kRows * count) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) slot[r] = load(source[r]);
      }
      for (int64_t r = 0; r < rows - whole; ++r) slot[r] = load(source[r]);
    }
  }

  // Panels lie in the last-level cache: with each register tile, a share of the next panel is fetched.
  template <bool kAccumulate, bool kByRows>
  static void sum_block(int64_t rows, int64_t columns, int64_t count, const float* block, const float* panels,
                        int64_t panel_stride, float* tile, int64_t tile_stride) {
    constexpr int64_t row_stride = kByRows ? kDepth : 1, depth_stride = kByRows ? 1 : kRows;
    const int64_t next_tile = kRows * (kByRows ? kDepth : count);
    const int64_t tiles = rows / kRows, rest = rows - tiles * kRows;
    const int64_t share = tiles ? (count * kPanel / kLine + tiles - 1) / tiles : 0;
    for (int64_t first = 0; first < columns; first += kPanel, panels += panel_stride, tile += kPanel) {
      const float* ahead = panels + panel_stride;
      for (int64_t t = 0; t < tiles; ++t, ahead += share * kLine) {
        if (first + kPanel < columns)
          for (int64_t line = 0; line < share; ++line) __builtin_prefetch(ahead + line * kLine);
        multiply_tile<kRows, kAccumulate>(count, block + t * next_tile, row_stride, depth_stride, panels,
                                          tile + t * kRows * tile_stride, tile_stride);
      }
      if (rest)
        multiply_rows<kAccumulate>(rest, count, block + tiles * next_tile, row_stride, depth_stride, panels,
                                   tile + tiles * kRows * tile_stride, tile_stride);
    }
  }

  static constexpr int64_t kLine = 16;  // floats in a cache line
};

// --- oneDNN's microkernels ------------------------------------------------------------------------------------------------

// Numbers of 32 bits, each a float or a pair of bf16, as columns instead of rows.
inline void transpose_words(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  const int64_t whole_rows = rows / kTranspose * kTranspose, whole_columns = columns / kTranspose * kTranspose;
  for (int64_t i = 0; i < whole_rows; i += kTranspose)
    for (int64_t j = 0; j < whole_columns; j += kTranspose)
      transpose_square(from + i * stride + j, stride, to + j * to_stride + i, to_stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
      std::memcpy(to + j * to_stride + i, from + i * stride + j, sizeof(float));
}

template <typename Scalar>
inline uint32_t pair_of(Scalar low, Scalar high) {
  bf16 halves[2];
  store(&halves[0], load(low));
  store(&halves[1], load(high));
  return static_cast<uint32_t>(halves[0].bits) | static_cast<uint32_t>(halves[1].bits) << 16;
}

// Element is the type of A. B is rounded to it, as torch.mm rounds fp32 weights for bf16 activations. Packed operands are made of
// words of 32 bits: a float, or two bf16 that follow each other in the depth. Rows and depth are padded with zeros, so that few
// sizes of generated code serve batches of every length.
template <typename Element_>
class Microkernel {
 public:
  using Element = Element_;
  static constexpr int64_t kWidth = 64, kDepth = 768;
  static constexpr int64_t kHeights[] = {96, 64, 48, 32, 16};
  static constexpr int64_t kPackingRows = 1, kRereading = 2;

  explicit Microkernel(const stoker_product_call& product)
      : multiply_(reinterpret_cast<Multiply>(product.microkernel)), release_(reinterpret_cast<Release>(product.release)) {}
  static int64_t padded_depth(int64_t depth) { return round_up(depth, 64); }
  static int64_t padded_rows(int64_t rows) { return round_up(rows, 16); }

  // (depth, 64) words in each panel, with zeros up to the depth `padded`.
  void pack(const stoker_operand& b, int64_t from, int64_t count, int64_t padded, int64_t first, int64_t columns, Element* panels,
            int64_t panel_stride) const {
    for_dtype(b.dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      for (int64_t j = 0; j < columns; j += kWidth) {
        const int64_t width = std::min(kWidth, columns - j), words = words_of(padded);
        float* panel = reinterpret_cast<float*>(panels + j / kWidth * panel_stride);
        if (width < kWidth || padded != count) std::memset(panel, 0, words * kWidth * sizeof(float));
        const Scalar* data = at<Scalar>(b, from, first + j);
        if (b.column_stride == 1)
          rows_to_words(data, b.row_stride, count, width, panel, kWidth);
        else
          columns_to_words(data, b.column_stride, count, width, panel);
      }
    });
  }

  void sum(const stoker_operand& a, int64_t from, int64_t count, bool first, int64_t row, int64_t rows, int64_t columns,
           const Element* panels, int64_t panel_stride, Element* block, float* tile, int64_t tile_stride) const {
    const int64_t depth = padded_depth(count), height = padded_rows(rows);
    const Element* left = block;
    int64_t left_stride = kDepth;
    if (a.column_stride == 1 && depth == count && height == rows && is_element(a.dtype)) {
      left = at<Element>(a, row, from);
      left_stride = a.row_stride;
    } else {
      pack_block(a, from, count, row, rows, block);
    }
    for (int64_t column = 0; column < columns; column += kWidth, panels += panel_stride, tile += kWidth)
      multiply_(height, kWidth, depth, left_stride, kWidth, tile_stride, !first, left, panels, tile, kIsPair);
  }

  // AMX: gives the tile registers of this thread back.
  void release() const {
    if (release_) release_(kIsPair);
  }

 private:
  using Multiply = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const Element*, const Element*, float*, bool);
  using Release = void (*)(bool);
  static constexpr bool kIsPair = std::is_same_v<Element, bf16>;

  static bool is_element(int32_t dtype) { return (dtype == STOKER_BFLOAT16) == kIsPair; }
  static int64_t words_of(int64_t depth) { return kIsPair ? (depth + 1) / 2 : depth; }

  // (count, width) numbers, rows in memory, to words (depth, width). A row that is missing to a pair counts as zeros.
  template <typename Scalar>
  static void rows_to_words(const Scalar* from, int64_t stride, int64_t count, int64_t width, float* words, int64_t word_stride) {
    if constexpr (kIsPair) {
      uint32_t* to = reinterpret_cast<uint32_t*>(words);
      for (int64_t p = 0; p < count; p += 2, from += 2 * stride, to += word_stride) {
        if (p + 1 < count) {
          const Scalar* next = from + stride;
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) to[j] = pair_of(from[j], next[j]);
        } else {
          for (int64_t j = 0; j < width; ++j) to[j] = pair_of(from[j], Scalar{});
        }
      }
    } else {
      for (int64_t p = 0; p < count; ++p, from += stride, words += word_stride) {
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) words[j] = load(from[j]);
      }
    }
  }

  // The same with the columns in memory: numbers that follow each other in the depth are neighbours.
  template <typename Scalar>
  static void columns_to_words(const Scalar* from, int64_t stride, int64_t count, int64_t width, float* words) {
    if constexpr (std::is_same_v<Scalar, float> && !kIsPair) {
      transpose_words(from, stride, width, count, words, kWidth);
    } else {
      alignas(64) float line[kTranspose * kDepth];
      const int64_t depth = words_of(count);
      for (int64_t j = 0; j < width; j += kTranspose) {
        const int64_t rows = std::min<int64_t>(kTranspose, width - j);
        for (int64_t i = 0; i < rows; ++i) row_to_words(from + (j + i) * stride, count, line + i * kDepth);
        transpose_words(line, kDepth, rows, depth, words + j, kWidth);
      }
    }
  }

  template <typename Scalar>
  static void row_to_words(const Scalar* from, int64_t count, float* words) {
    if constexpr (kIsPair) {
      uint32_t* to = reinterpret_cast<uint32_t*>(words);
#pragma omp simd
      for (int64_t p = 0; p < count / 2; ++p) to[p] = pair_of(from[2 * p], from[2 * p + 1]);
      if (count % 2) to[count / 2] = pair_of(from[count - 1], Scalar{});
    } else {
#pragma omp simd
      for (int64_t p = 0; p < count; ++p) words[p] = load(from[p]);
    }
  }

  // Rows [row, row + rows) and depth [from, from + count) of A, kDepth elements apart, with zeros to the padded sizes.
  static void pack_block(const stoker_operand& a, int64_t from, int64_t count, int64_t row, int64_t rows, Element* block) {
    const int64_t depth = padded_depth(count), height = padded_rows(rows), stride = words_of(kDepth);
    float* words = reinterpret_cast<float*>(block);
    if (depth != count || height != rows) std::memset(block, 0, height * kDepth * sizeof(Element));
    for_dtype(a.dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      if (a.column_stride == 1) {
        const Scalar* data = at<Scalar>(a, row, from);
        for (int64_t i = 0; i < rows; ++i) row_to_words(data + i * a.row_stride, count, words + i * stride);
      } else {
        // A few columns at a time: as words with rows side by side, then transposed.
        alignas(64) float part[kTranspose * kTileRows];
        constexpr int64_t step = kIsPair ? 2 * kTranspose : kTranspose;
        for (int64_t p = 0; p < count; p += step) {
          const int64_t columns = std::min(step, count - p);
          rows_to_words(at<Scalar>(a, row, from + p), a.column_stride, columns, rows, part, kTileRows);
          transpose_words(part, kTileRows, words_of(columns), rows, words + words_of(p), stride);
        }
      }
    });
  }

  Multiply multiply_;
  Release release_;
};

}  // namespace stoker
