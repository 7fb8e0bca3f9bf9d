// The scores of attention that depend on the distance of query and key, and their gradients:
//
//   S_ij += scale * (q_i . position_k[r] + k_j . position_q[r]),   r = distance_rows[reach - 1 + i - j]
//
// Nothing is gathered. For a block of rows (queries for position_k, keys for position_q), the products with the table rows of
// all distances that occur are one matrix product, with the distances side by side in the order in which the columns meet
// them. The scores are its diagonals: one row further down they begin one number further left, so that the band of a block is
// a matrix whose rows lie one number closer together. The price is rows - 1 unused columns for each block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/gemm.h"
#include "core/types.h"
#include "kernels/attention_blocks.h"

namespace stoker {

constexpr int64_t kBandRows = 64;
static_assert(kBandRows >= kQueryBlock && kQueryChunk <= kKeyBlock, "bands of queries and of keys share their size");
constexpr int64_t kBandStride = kKeyBlock + kBandRows + kPanel + 16;

// Where the scores of a block of rows and columns lie in the products of these rows with a table.
struct Band {
  int64_t first;  // of the table's elements, at a panel
  int64_t width;  // elements
  int64_t shift;  // where the first row begins; each further one begins one number further left
};

// The rows of one table for the distances of one sequence, as one head sees them. Element e belongs to all rows and columns of
// scores with column - row = e - (length - 1).
class DistanceTable {
 public:
  // `sign`: 1 if the distance grows from left to right, with keys as rows; -1 with queries as rows.
  DistanceTable(const stoker_attention_call& call, const void* table, int64_t stride, float* gradient, int64_t sign, float scale)
      : call_(call), table_(table), stride_(stride), gradient_(gradient), sign_(sign), scale_(scale), size_(call.head_size),
        width_(round_up(call.head_size, kPanel)) {}

  bool used() const { return table_ != nullptr; }

  int64_t floats(int64_t length, bool backward) const {
    if (!used()) return 0;
    const int64_t elements = 2 * length - 1;
    return (round_up(elements, kPanel) + kPanel) * size_ + (backward ? 2 * elements * width_ : 0);
  }

  void take(Scratch& scratch, int64_t length, bool backward) {
    if (!used()) return;
    length_ = length;
    elements_ = 2 * length - 1;
    rows_ = scratch.take(kPanel * size_);
    columns_panels_ = scratch.take(round_up(elements_, kPanel) * size_);
    if (!backward) return;
    row_panels_ = scratch.take(elements_ * width_);
    sums_ = scratch.take(elements_ * width_);
    std::fill(sums_, sums_ + elements_ * width_, 0.0f);
  }

  template <typename Scalar>
  void load(int64_t head, bool backward) {
    if (!used()) return;
    const Scalar* table = static_cast<const Scalar*>(table_) + head * size_;
    for (int64_t first = 0; first < elements_; first += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, elements_ - first);
      for (int64_t i = 0; i < count; ++i) {
        const Scalar* from = table + row_of(first + i) * stride_;
        float* to = rows_ + i * size_;
#pragma omp simd
        for (int64_t j = 0; j < size_; ++j) to[j] = stoker::load(from[j]) * scale_;
        if (!backward) continue;
        for (int64_t j = 0; j < size_; j += kPanel)
          pack_row(to + j, size_ - j, row_panels_ + j * elements_ + (first + i) * kPanel);
      }
      pack_columns(rows_, size_, size_, count, columns_panels_ + first * size_);
    }
  }

  Band band(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const int64_t lowest = column - (row + rows - 1) + length_ - 1, first = lowest - lowest % kPanel;
    return {first, column + columns - 1 - row + length_ - first, column - row + length_ - 1 - first};
  }

  // products = rows times the table's elements of the band.
  void multiply_band(const Band& band, int64_t rows, const float* content, float* products) const {
    multiply<false>(rows, band.width, size_, content, size_, 1, columns_panels_ + band.first * size_, kPanel * size_, products,
                    kBandStride);
  }

  // From the gradient of a band: adds that of the rows to `drows`, and that of the table to its sums. `panels` are the rows.
  void add_gradients(const Band& band, int64_t rows, const float* dband, const float* panels, int64_t panel_stride,
                     float* drows) const {
    multiply<true>(rows, size_, band.width, dband, kBandStride, 1, row_panels_ + band.first * kPanel, kPanel * elements_, drows,
                   width_);
    if (gradient_)
      multiply<true>(band.width, size_, rows, dband, 1, kBandStride, panels, panel_stride, sums_ + band.first * width_, width_);
  }

  // Empties the gradient of one head.
  void clear_gradient(int64_t head, int64_t group) const {
    if (!used() || !gradient_) return;
    for (int64_t row = 0; row < call_.position_rows; ++row) {
      float* to = gradient_ + ((group * call_.position_rows + row) * call_.heads + head) * size_;
      std::fill(to, to + size_, 0.0f);
    }
  }

  // Adds the sums, times `factor`, to the gradient of the table.
  void store_gradient(int64_t head, int64_t group, float factor) const {
    if (!used() || !gradient_) return;
    for (int64_t e = 0; e < elements_; ++e) {
      float* to = gradient_ + ((group * call_.position_rows + row_of(e)) * call_.heads + head) * size_;
      const float* from = sums_ + e * width_;
#pragma omp simd
      for (int64_t j = 0; j < size_; ++j) to[j] += from[j] * factor;
    }
  }

 private:
  int64_t row_of(int64_t e) const { return call_.distance_rows[call_.reach - 1 + sign_ * (e - (length_ - 1))]; }

  const stoker_attention_call& call_;
  const void* table_;
  const int64_t stride_;
  float* gradient_;
  const int64_t sign_;
  const float scale_;
  const int64_t size_, width_;
  int64_t length_ = 0, elements_ = 0;
  float *rows_ = nullptr, *columns_panels_ = nullptr, *row_panels_ = nullptr, *sums_ = nullptr;
};

// to[j][i] = or += from[i][j] for `rows` x `columns` numbers.
template <bool kAdd>
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  const auto one = [&](int64_t i, int64_t j) {
    float& target = to[j * to_stride + i];
    target = (kAdd ? target : 0.0f) + from[i * from_stride + j];
  };
  int64_t i = 0;
  for (; i + kTranspose <= rows; i += kTranspose) {
    int64_t j = 0;
    for (; j + kTranspose <= columns; j += kTranspose) {
      const float* source = from + i * from_stride + j;
      float* target = to + j * to_stride + i;
      if (!kAdd) {
        transpose_square(source, from_stride, target, to_stride);
        continue;
      }
      alignas(64) float square[kTranspose * kTranspose];
      transpose_square(source, from_stride, square, kTranspose);
      for (int row = 0; row < kTranspose; ++row)
#pragma omp simd
        for (int k = 0; k < kTranspose; ++k) target[row * to_stride + k] += square[row * kTranspose + k];
    }
    for (; j < columns; ++j)
      for (int k = 0; k < kTranspose; ++k) one(i + k, j);
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) one(i, j);
}

// Both tables, for the tasks of attention. The order of calls: begin a sequence; for each block of keys and chunk of queries,
// begin it; for each block of queries in it, add to the scores and, in backward, take their gradient; in backward, end it, and
// the sequence. Without tables every call returns at once.
class RelativePositions {
 public:
  RelativePositions(const stoker_attention_call& call, bool backward)
      : size_(call.head_size), width_(round_up(call.head_size, kPanel)), scale_(call.scale), backward_(backward),
        of_keys_(call, call.position_k, call.position_k_row, call.dposition_k, -1, 1.0f),
        of_queries_(call, call.position_q, call.position_q_row, call.dposition_q, 1, call.scale) {}

  void clear_gradients(int64_t head, int64_t group) const {
    of_keys_.clear_gradient(head, group);
    of_queries_.clear_gradient(head, group);
  }

  int64_t floats(int64_t length) const {
    const int64_t bands = (of_keys_.used() ? kBandRows : 0) + (of_queries_.used() ? (backward_ ? 2 : 1) * kKeyBlock : 0);
    return of_keys_.floats(length, backward_) + of_queries_.floats(length, backward_) + bands * kBandStride + 256;
  }

  // Takes floats(length) from the scratch memory.
  template <typename Scalar>
  void begin_sequence(Scratch& scratch, int64_t length, int64_t head) {
    of_keys_.take(scratch, length, backward_);
    of_queries_.take(scratch, length, backward_);
    if (of_keys_.used()) query_band_ = scratch.take(kBandRows * kBandStride);
    if (of_queries_.used()) key_bands_ = scratch.take(kKeyBlock * kBandStride);
    if (of_queries_.used() && backward_) key_gradients_ = scratch.take(kKeyBlock * kBandStride);
    of_keys_.load<Scalar>(head, backward_);
    of_queries_.load<Scalar>(head, backward_);
  }

  // `keys`: the keys [first_key, first_key + count), dense.
  void begin_block(int64_t first_key, int64_t count, const float* keys, int64_t first_query, int64_t queries) {
    first_key_ = first_key;
    keys_ = count;
    first_query_ = first_query;
    queries_ = queries;
    if (!of_queries_.used()) return;
    for (int64_t part = 0; part < count; part += kBandRows) {
      const Band band = key_band(part);
      of_queries_.multiply_band(band, part_rows(part), keys + part * size_, key_bands_ + part * kBandStride);
      if (!backward_) continue;
      for (int64_t row = part; row < part + part_rows(part); ++row)
        std::fill(key_gradients_ + row * kBandStride, key_gradients_ + row * kBandStride + band.width, 0.0f);
    }
  }

  // Adds to the scores of `count` queries from `query` on, which are dense and scaled, and the keys of `range`.
  void add_scores(int64_t query, int64_t count, const float* queries, KeyRange range, float* scores) const {
    const int64_t seen = range.end - range.begin;
    if (of_keys_.used()) {
      const Band band = of_keys_.band(query, count, range.begin, seen);
      of_keys_.multiply_band(band, count, queries, query_band_);
      for (int64_t i = 0; i < count; ++i) {
        const float* from = query_band_ + i * (kBandStride - 1) + band.shift;
        float* to = scores + i * kScoreStride;
#pragma omp simd
        for (int64_t j = 0; j < seen; ++j) to[j] += from[j];
      }
    }
    if (of_queries_.used())
      for_parts(query, range, [&](int64_t keys, int64_t column, int64_t at) {
        transpose<true>(key_bands_ + at, kBandStride - 1, keys, count, scores + column, kScoreStride);
      });
  }

  // From the gradient of the same scores: adds that of the queries, without the scale, to `dqueries`. `query_panels` are the
  // scaled queries.
  void take_gradient(int64_t query, int64_t count, KeyRange range, const float* dscores, const float* query_panels,
                     float* dqueries) const {
    const int64_t seen = range.end - range.begin;
    if (of_keys_.used()) {
      const Band band = of_keys_.band(query, count, range.begin, seen);
      for (int64_t i = 0; i < count; ++i) {
        float* to = query_band_ + i * kBandStride;
        const int64_t begin = band.shift - i;
        std::fill(to, to + begin, 0.0f);
        std::copy(dscores + i * kScoreStride, dscores + i * kScoreStride + seen, to + begin);
        std::fill(to + begin + seen, to + band.width, 0.0f);
      }
      of_keys_.add_gradients(band, count, query_band_, query_panels, kPanel * count, dqueries);
    }
    if (of_queries_.used())
      for_parts(query, range, [&](int64_t keys, int64_t column, int64_t at) {
        transpose<false>(dscores + column, kScoreStride, count, keys, key_gradients_ + at, kBandStride - 1);
      });
  }

  // Adds the gradient of the keys to `dkeys`. `key_panels` are the keys of the block.
  void end_block(const float* key_panels, float* dkeys) const {
    if (!of_queries_.used()) return;
    for (int64_t part = 0; part < keys_; part += kBandRows)
      of_queries_.add_gradients(key_band(part), part_rows(part), key_gradients_ + part * kBandStride, key_panels + part * kPanel,
                                kPanel * keys_, dkeys + part * width_);
  }

  void end_sequence(int64_t head, int64_t group) const {
    of_keys_.store_gradient(head, group, 1.0f);  // the queries were scaled
    of_queries_.store_gradient(head, group, scale_);
  }

 private:
  int64_t part_rows(int64_t part) const { return std::min(kBandRows, keys_ - part); }
  Band key_band(int64_t part) const { return of_queries_.band(first_key_ + part, part_rows(part), first_query_, queries_); }

  // f(keys, column, at) for each part of the key bands that meets `range`: so many of its keys are columns of the scores from
  // `column` on, and the scores of the first of them begin at key_bands_[at], those of the next kBandStride - 1 further on.
  template <typename F>
  void for_parts(int64_t query, KeyRange range, F&& f) const {
    for (int64_t part = 0; part < keys_; part += kBandRows) {
      const int64_t begin = std::max(range.begin, first_key_ + part);
      const int64_t end = std::min(range.end, first_key_ + part + part_rows(part));
      if (begin >= end) continue;
      const int64_t row = begin - first_key_ - part;
      f(end - begin, begin - range.begin, (part + row) * kBandStride + key_band(part).shift - row + query - first_query_);
    }
  }

  const int64_t size_, width_;
  const float scale_;
  const bool backward_;
  DistanceTable of_keys_, of_queries_;
  int64_t first_key_ = 0, keys_ = 0, first_query_ = 0, queries_ = 0;
  float *query_band_ = nullptr, *key_bands_ = nullptr, *key_gradients_ = nullptr;
};

}  // namespace stoker
