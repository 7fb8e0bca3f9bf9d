// Dropout: y = x * factor(key, row, column). Its own gradient: dx = dy * factor.
#include "core/parallel.h"
#include "core/random.h"
#include "core/types.h"

namespace stoker {

template <typename Scalar>
static void dropout_rows(const Scalar* x, Scalar* y, int64_t rows, int64_t columns, const Dropout& dropout, int threads) {
  // Split by group of 64 columns, not by row: one long row must keep all cores busy too.
  const int64_t groups = (columns + kRandomGroup - 1) / kRandomGroup;
  parallel_ranges(rows * groups, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    alignas(64) float factors[kRandomGroup];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / groups, group = index % groups;
      const int64_t first = group * kRandomGroup, count = std::min<int64_t>(kRandomGroup, columns - first);
      const Scalar* from = x + row * columns + first;
      Scalar* to = y + row * columns + first;
      dropout_factors(dropout, static_cast<uint64_t>(row), static_cast<uint32_t>(group), factors);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) store(to + i, load(from[i]) * factors[i]);
    }
  });
}

}  // namespace stoker

STOKER_API int32_t stoker_dropout(const void* x, void* y, int64_t rows, int64_t columns, float p, uint64_t key,
                                  int32_t dtype, int32_t threads) {
  using namespace stoker;
  return guarded([&] {
    const Dropout dropout(p, key);
    for_dtype(dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      dropout_rows(static_cast<const Scalar*>(x), static_cast<Scalar*>(y), rows, columns, dropout, threads);
    });
  });
}
