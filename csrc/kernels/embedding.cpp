// Embedding lookups: plain, and as sum of up to three tables + LayerNorm + dropout; and the scatter of their gradients.
//   z = sum_k table_k[ids_k],   y = ((z - mean) * rstd * weight + bias) * factor
// Backward looks z up again. A gradient row of a table is the sum over the tokens that used it, in the order of the tokens.
#include <cstring>
#include <vector>

#include "core/buffer.h"
#include "core/normalize.h"
#include "core/parallel.h"
#include "core/random.h"
#include "core/reduce.h"
#include "core/types.h"

namespace stoker {

constexpr int kTables = 3;

struct Tables {
  const int64_t* ids[kTables];  // null where there is no such table
  const void* rows[kTables];
  int64_t columns;
};

template <typename Scalar>
static void lookup_row(const Tables& tables, int64_t token, float* z) {
  const int64_t columns = tables.columns;
  bool first = true;
  for (int k = 0; k < kTables; ++k) {
    if (!tables.ids[k]) continue;
    const Scalar* from = static_cast<const Scalar*>(tables.rows[k]) + tables.ids[k][token] * columns;
    if (first) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) z[i] = load(from[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) z[i] += load(from[i]);
    }
    first = false;
  }
}

template <typename Table, typename Scalar>
static void forward(const Tables& tables, const float* weight, const float* bias, Scalar* y, float* stats, int64_t tokens,
                    float eps, const Dropout& dropout, int threads) {
  const int64_t columns = tables.columns, room = columns + kRandomGroup;
  parallel_ranges(tokens, threads_for(tokens * columns, threads), [&](int64_t begin, int64_t end) {
    float* z = thread_row<0>(room);
    float* factors = thread_row<1>(room);
    for (int64_t token = begin; token < end; ++token) {
      lookup_row<Table>(tables, token, z);
      const Moments m = moments(z, sum(z, columns), columns, eps, false);
      stats[token] = m.mean;
      stats[tokens + token] = m.rstd;
      Scalar* to = y + token * columns;
      if (!dropout.active()) {
        normalize_row(z, m, weight, bias, columns, to);
        continue;
      }
      row_factors(dropout, token, columns, factors);
      normalize_row(z, m, weight, bias, columns, z);
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) store(to + i, z[i] * factors[i]);
    }
  });
}

enum { kWeight, kBias, kKinds };

template <typename Table, typename Scalar>
static void backward(const Tables& tables, const Scalar* dy, const float* weight, const float* stats, float* dz,
                     const ColumnSums& sums, int64_t tokens, const Dropout& dropout, int threads) {
  const int64_t columns = tables.columns, room = columns + kRandomGroup;
  parallel_tasks(sums.count, threads_for(tokens * columns, threads), [&](int64_t block) {
    float* z = thread_row<0>(room);
    float* factors = thread_row<1>(room);
    float* g = thread_row<2>(room);
    float* dweight = sums.start(block, kWeight);
    float* dbias = sums.start(block, kBias);
    for (int64_t token = block * sums.size; token < std::min(tokens, (block + 1) * sums.size); ++token) {
      lookup_row<Table>(tables, token, z);
      const Scalar* from = dy + token * columns;
      float* to = dz + token * columns;
      const Moments m{stats[token], stats[tokens + token]};
      const auto finish = [&](auto&& dy_at) {
        const RowGradient gradient = read_row([=](int64_t i) { return z[i]; }, dy_at, m, weight, columns, false, z, g,
                                              dweight, dbias);
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) to[i] = gradient.at(g[i], z[i]);
      };
      if (dropout.active()) {
        row_factors(dropout, token, columns, factors);
        finish([=](int64_t i) { return load(from[i]) * factors[i]; });
      } else {
        finish([=](int64_t i) { return load(from[i]); });
      }
    }
  });
}

// The tokens of each table row, in order of the tokens, cut into chunks of at most kChunk: a row that many tokens share (the
// type table has two) is summed by several threads, in chunks that do not depend on how many there are.
struct Chunk {
  int64_t row, begin, end;  // of `order`
  int64_t partial;          // where its sum goes, if the row has other chunks; else -1
};

struct Plan {
  static constexpr int64_t kChunk = 64;
  std::vector<int64_t> starts;  // of each table row in `order`
  std::vector<int64_t> order;
  std::vector<Chunk> chunks;
  std::vector<int64_t> shared;  // first chunk of each row that has several
  int64_t partials = 0;

  Plan(const int64_t* ids, int64_t tokens, int64_t rows, int64_t skip) : starts(rows + 1, 0), order(tokens) {
    for (int64_t token = 0; token < tokens; ++token)
      if (ids[token] != skip) ++starts[ids[token] + 1];
    for (int64_t row = 0; row < rows; ++row) starts[row + 1] += starts[row];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t token = 0; token < tokens; ++token)
      if (ids[token] != skip) order[next[ids[token]]++] = token;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = starts[row], end = starts[row + 1];
      const bool several = end - begin > kChunk;
      if (several) shared.push_back(static_cast<int64_t>(chunks.size()));
      for (int64_t at = begin; at < end; at += kChunk)
        chunks.push_back({row, at, std::min(end, at + kChunk), several ? partials++ : -1});
    }
  }
  bool used(int64_t row) const { return starts[row] != starts[row + 1]; }
};

template <typename Scalar>
static void add_tokens(const Plan& plan, const Chunk& chunk, const Scalar* dz, int64_t columns, float* total) {
  for (int64_t at = chunk.begin; at < chunk.end; ++at) {
    const Scalar* from = dz + plan.order[at] * columns;
    if (at == chunk.begin) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) total[i] = load(from[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) total[i] += load(from[i]);
    }
  }
}

template <typename Scalar, typename Table>
static void scatter(const Scalar* dz, const int64_t* ids, Table* grad, int64_t tokens, int64_t rows, int64_t columns,
                    int64_t skip, int threads) {
  const Plan plan(ids, tokens, rows, skip);
  const Buffer<float> partial(plan.partials * columns);
  const auto write = [&](int64_t row, const float* total) {
    Table* to = grad + row * columns;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) store(to + i, total[i]);
  };
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (!plan.used(row)) std::memset(static_cast<void*>(grad + row * columns), 0, columns * sizeof(Table));
  });
  constexpr int64_t kBatch = 8;  // chunks handed out at a time
  const int64_t count = static_cast<int64_t>(plan.chunks.size());
  parallel_tasks((count + kBatch - 1) / kBatch, threads_for(tokens * columns, threads), [&](int64_t batch) {
    float* total = thread_row<0>(columns);
    for (int64_t index = batch * kBatch; index < std::min(count, (batch + 1) * kBatch); ++index) {
      const Chunk& chunk = plan.chunks[index];
      if (chunk.partial >= 0) {
        add_tokens(plan, chunk, dz, columns, partial.get() + chunk.partial * columns);
      } else {
        add_tokens(plan, chunk, dz, columns, total);
        write(chunk.row, total);
      }
    }
  });
  parallel_tasks(static_cast<int64_t>(plan.shared.size()), threads_for(plan.partials * columns, threads), [&](int64_t which) {
    const Chunk* chunk = &plan.chunks[plan.shared[which]];
    const Chunk* end = plan.chunks.data() + plan.chunks.size();
    const int64_t row = chunk->row;
    float* total = partial.get() + chunk->partial * columns;
    for (++chunk; chunk != end && chunk->row == row; ++chunk) {
      const float* from = partial.get() + chunk->partial * columns;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) total[i] += from[i];
    }
    write(row, total);
  });
}

// The first id outside its table: bad[0] the table, bad[1] the token; bad[0] = -1 if all are inside.
static void check_ids(const Tables& tables, const int64_t* sizes, int64_t tokens, int64_t* bad) {
  bad[0] = -1;
  for (int k = 0; k < kTables; ++k) {
    if (!tables.ids[k]) continue;
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t id = tables.ids[k][token];
      if (id >= 0 && id < sizes[k]) continue;
      bad[0] = k;
      bad[1] = token;
      return;
    }
  }
}

template <typename F>
static void for_dtypes(int first, int second, F&& f) {
  for_dtype(first, [&](auto* a) { for_dtype(second, [&](auto* b) { f(a, b); }); });
}

}  // namespace stoker

// sizes[3]: rows of each table. bad[2]: see check_ids; nothing else is written if an id is outside its table.
STOKER_API void stoker_embedding_norm_forward(const int64_t* ids0, const int64_t* ids1, const int64_t* ids2,
                                              const void* table0, const void* table1, const void* table2,
                                              const int64_t* sizes, const void* weight, const void* bias, void* y,
                                              float* stats, int64_t* bad, int64_t tokens, int64_t columns, float p,
                                              uint64_t key, float eps, int table_dtype, int dtype, int weight_dtype,
                                              int bias_dtype, int threads) {
  using namespace stoker;
  const Tables tables{{ids0, ids1, ids2}, {table0, table1, table2}, columns};
  check_ids(tables, sizes, tokens, bad);
  if (bad[0] >= 0) return;
  const Buffer<float> wide_weight = widen(weight, weight_dtype, columns), wide_bias = widen(bias, bias_dtype, columns);
  for_dtypes(table_dtype, dtype, [&](auto* table, auto* scalar) {
    using Table = std::remove_pointer_t<decltype(table)>;
    using Scalar = std::remove_pointer_t<decltype(scalar)>;
    forward<Table>(tables, wide_weight.get(), wide_bias.get(), static_cast<Scalar*>(y), stats, tokens, eps,
                   Dropout(p, key), threads);
  });
}

// dz[tokens * columns]: the gradient of the sum of the lookups, for stoker_embedding_scatter.
STOKER_API void stoker_embedding_norm_backward(const int64_t* ids0, const int64_t* ids1, const int64_t* ids2,
                                               const void* table0, const void* table1, const void* table2,
                                               const void* dy, const void* weight, const float* stats, float* dz,
                                               void* dweight, void* dbias, int64_t tokens, int64_t columns, float p,
                                               uint64_t key, int table_dtype, int dtype, int weight_dtype,
                                               int bias_dtype, int threads) {
  using namespace stoker;
  const Tables tables{{ids0, ids1, ids2}, {table0, table1, table2}, columns};
  const Buffer<float> wide_weight = widen(weight, weight_dtype, columns);
  const ColumnSums sums(tokens, columns, kKinds);
  for_dtypes(table_dtype, dtype, [&](auto* table, auto* scalar) {
    using Table = std::remove_pointer_t<decltype(table)>;
    using Scalar = std::remove_pointer_t<decltype(scalar)>;
    backward<Table>(tables, static_cast<const Scalar*>(dy), wide_weight.get(), stats, dz, sums, tokens, Dropout(p, key),
                    threads);
  });
  sums.finish(kWeight, dweight, weight_dtype, threads);
  sums.finish(kBias, dbias, bias_dtype, threads);
}

// grad[rows * columns] = the sum of dz over the tokens of each row; 0 for rows without tokens, and for row `skip`.
STOKER_API void stoker_embedding_scatter(const void* dz, const int64_t* ids, void* grad, int64_t tokens, int64_t rows,
                                         int64_t columns, int64_t skip, int dtype, int table_dtype, int threads) {
  using namespace stoker;
  for_dtypes(dtype, table_dtype, [&](auto* scalar, auto* table) {
    using Scalar = std::remove_pointer_t<decltype(scalar)>;
    using Table = std::remove_pointer_t<decltype(table)>;
    scatter(static_cast<const Scalar*>(dz), ids, static_cast<Table*>(grad), tokens, rows, columns, skip, threads);
  });
}

// y[token] = table[ids[token]], for elements of `bytes` bytes. bad: as above.
STOKER_API void stoker_embedding_lookup(const int64_t* ids, const void* table, void* y, int64_t* bad, int64_t tokens,
                                        int64_t rows, int64_t columns, int64_t bytes, int threads) {
  using namespace stoker;
  const Tables tables{{ids, nullptr, nullptr}, {table, nullptr, nullptr}, columns};
  const int64_t sizes[kTables] = {rows, 0, 0};
  check_ids(tables, sizes, tokens, bad);
  if (bad[0] >= 0) return;
  const int64_t row = columns * bytes;
  parallel_ranges(tokens, threads_for(tokens * columns, threads), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      std::memcpy(static_cast<char*>(y) + token * row, static_cast<const char*>(table) + ids[token] * row, row);
  });
}
