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

template <typename Scalar>
static void lookup_row(const stoker_embedding_norm_call& call, int64_t token, float* z) {
  const int64_t columns = call.columns;
  bool first = true;
  for (int k = 0; k < kTables; ++k) {
    if (!call.ids[k]) continue;
    const Scalar* from = static_cast<const Scalar*>(call.tables[k]) + call.ids[k][token] * columns;
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
static void forward(const stoker_embedding_norm_call& call, const float* weight, const float* bias) {
  const int64_t tokens = call.tokens, columns = call.columns, length = columns + kRandomGroup;
  const Dropout dropout(call.p, call.key);
  float* stats = call.stats;
  parallel_ranges(tokens, threads_for(tokens * columns, call.threads), [&](int64_t begin, int64_t end) {
    float* z = thread_row<0>(length);
    float* factors = thread_row<1>(length);
    for (int64_t token = begin; token < end; ++token) {
      lookup_row<Table>(call, token, z);
      const Moments m = moments(z, sum(z, columns), columns, call.eps, false);
      stats[token] = m.mean;
      stats[tokens + token] = m.rstd;
      Scalar* to = static_cast<Scalar*>(call.y) + token * columns;
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

enum { kWeight, kBias };

template <typename Table, typename Scalar>
static void backward(const stoker_embedding_norm_call& call, const float* weight, const ColumnSums& sums) {
  const int64_t tokens = call.tokens, columns = call.columns, length = columns + kRandomGroup;
  const Dropout dropout(call.p, call.key);
  parallel_tasks(sums.count, threads_for(tokens * columns, call.threads), [&](int64_t block) {
    float* z = thread_row<0>(length);
    float* factors = thread_row<1>(length);
    float* g = thread_row<2>(length);
    sums.run(block, [&](int64_t begin, int64_t end, float* const* sum_rows) {
      const ParameterSums parameters{sum_rows[kWeight], sum_rows[kBias]};
      for (int64_t token = begin; token < end; ++token) {
        lookup_row<Table>(call, token, z);
        const Scalar* from = static_cast<const Scalar*>(call.dy) + token * columns;
        float* to = call.dz + token * columns;
        const Moments m{call.stats[token], call.stats[tokens + token]};
        const auto finish = [&](auto&& dy_at) {
          const RowGradient gradient =
              read_row([=](int64_t i) { return z[i]; }, dy_at, m, weight, columns, false, z, g, parameters);
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
  const int64_t count = static_cast<int64_t>(plan.chunks.size());
  const int useful = threads_for(tokens * columns, threads);
  const int64_t size = std::clamp<int64_t>(count / (4 * useful), 1, 8);  // chunks handed out at a time
  parallel_tasks((count + size - 1) / size, useful, [&](int64_t batch) {
    float* total = thread_row<0>(columns);
    for (int64_t index = batch * size; index < std::min(count, (batch + 1) * size); ++index) {
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

// The first of `ids` that is not a row of a table of `rows`, or -1.
static int64_t bad_token(const int64_t* ids, int64_t tokens, int64_t rows) {
  for (int64_t token = 0; token < tokens; ++token)
    if (ids[token] < 0 || ids[token] >= rows) return token;
  return -1;
}

template <typename F>
static void for_dtypes(int first, int second, F&& f) {
  for_dtype(first, [&](auto* a) { for_dtype(second, [&](auto* b) { f(a, b); }); });
}

}  // namespace stoker

STOKER_API int32_t stoker_embedding_norm_forward(stoker_embedding_norm_call* call) {
  using namespace stoker;
  for (int k = 0; k < kTables; ++k) {
    if (!call->ids[k]) continue;
    call->bad_table = k;
    call->bad_token = bad_token(call->ids[k], call->tokens, call->table_rows[k]);
    if (call->bad_token >= 0) return STOKER_BAD_INDEX;
  }
  return guarded([&] {
    const Buffer<float> weight = widen(call->weight, call->weight_dtype, call->columns),
                        bias = widen(call->bias, call->bias_dtype, call->columns);
    for_dtypes(call->table_dtype, call->dtype, [&](auto* table, auto* scalar) {
      using Table = std::remove_pointer_t<decltype(table)>;
      using Scalar = std::remove_pointer_t<decltype(scalar)>;
      forward<Table, Scalar>(*call, weight.get(), bias.get());
    });
  });
}

STOKER_API int32_t stoker_embedding_norm_backward(const stoker_embedding_norm_call* call) {
  using namespace stoker;
  return guarded([&] {
    const Buffer<float> weight = widen(call->weight, call->weight_dtype, call->columns);
    const bool trained = call->dweight || call->dbias;
    const ColumnSums sums(call->tokens, call->columns, {trained, trained}, call->threads);
    for_dtypes(call->table_dtype, call->dtype, [&](auto* table, auto* scalar) {
      using Table = std::remove_pointer_t<decltype(table)>;
      using Scalar = std::remove_pointer_t<decltype(scalar)>;
      backward<Table, Scalar>(*call, weight.get(), sums);
    });
    sums.finish({{kWeight, call->dweight, call->weight_dtype}, {kBias, call->dbias, call->bias_dtype}}, call->threads);
  });
}

STOKER_API int32_t stoker_embedding_scatter(const stoker_embedding_call* call) {
  using namespace stoker;
  return guarded([&] {
    for_dtypes(call->dtype, call->table_dtype, [&](auto* scalar, auto* table) {
      using Scalar = std::remove_pointer_t<decltype(scalar)>;
      using Table = std::remove_pointer_t<decltype(table)>;
      scatter(static_cast<const Scalar*>(call->dy), call->ids, static_cast<Table*>(call->dtable), call->tokens, call->rows,
              call->columns, call->skip, call->threads);
    });
  });
}

STOKER_API int32_t stoker_embedding_lookup(stoker_embedding_call* call) {
  using namespace stoker;
  call->bad_token = bad_token(call->ids, call->tokens, call->rows);
  if (call->bad_token >= 0) return STOKER_BAD_INDEX;
  return guarded([&] {
    for_dtype(call->table_dtype, [&](auto* tag) {
      using Table = std::remove_pointer_t<decltype(tag)>;
      const int64_t columns = call->columns;
      const Table* table = static_cast<const Table*>(call->table);
      Table* y = static_cast<Table*>(call->y);
      parallel_ranges(call->tokens, threads_for(call->tokens * columns, call->threads), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
          std::memcpy(y + token * columns, table + call->ids[token] * columns, columns * sizeof(Table));
      });
    });
  });
}
