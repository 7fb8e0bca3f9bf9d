// Sums, copies, conversions, dropout and multiples of rows that need not be dense: what is left between the products and kernels of
// a layer.
#include "core/parallel.h"
#include "core/random.h"
#include "core/types.h"

namespace stoker {

namespace {

template <typename Scalar>
float rounded(float value) {
  Scalar stored;
  store(&stored, value);
  return load(stored);
}

template <typename Scalar, typename Other>
void add(const stoker_rows_call& call, int64_t row) {
  const Scalar* x = static_cast<const Scalar*>(call.x) + row * call.x_stride;
  const Other* y = static_cast<const Other*>(call.y) + row * call.y_stride;
  Scalar* z = static_cast<Scalar*>(call.z) + row * call.z_stride;
#pragma omp simd
  for (int64_t i = 0; i < call.columns; ++i) store(z + i, load(x[i]) + rounded<Scalar>(load(y[i])));
}

template <typename Scalar>
void copy(const stoker_rows_call& call, int64_t row) {
  const Scalar* x = static_cast<const Scalar*>(call.x) + row * call.x_stride;
  std::copy(x, x + call.columns, static_cast<Scalar*>(call.z) + row * call.z_stride);
}

template <typename Scalar, typename Other>
void convert(const stoker_rows_call& call, int64_t row) {
  const Other* y = static_cast<const Other*>(call.y) + row * call.y_stride;
  Scalar* z = static_cast<Scalar*>(call.z) + row * call.z_stride;
#pragma omp simd
  for (int64_t i = 0; i < call.columns; ++i) store(z + i, load(y[i]));
}

template <typename Scalar>
void drop(const stoker_rows_call& call, const Dropout& dropout, int64_t row) {
  const Scalar* x = static_cast<const Scalar*>(call.x) + row * call.x_stride;
  Scalar* z = static_cast<Scalar*>(call.z) + row * call.z_stride;
  alignas(64) float factors[kRandomGroup];
  for (int64_t first = 0; first < call.columns; first += kRandomGroup) {
    const int64_t count = std::min<int64_t>(kRandomGroup, call.columns - first);
    dropout_factors(dropout, static_cast<uint64_t>(row), static_cast<uint32_t>(first / kRandomGroup), factors);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(z + first + i, load(x[first + i]) * factors[i]);
  }
}

template <typename Scalar, typename Result>
void scale(const stoker_scale_call& call, int64_t row) {
  const Scalar* x = static_cast<const Scalar*>(call.x) + row * call.x_stride;
  Result* z = static_cast<Result*>(call.z) + row * call.z_stride;
  if (call.x_column != 1) {
    for (int64_t i = 0; i < call.columns; ++i) store(z + i, call.factor * load(x[i * call.x_column]));
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < call.columns; ++i) store(z + i, call.factor * load(x[i]));
}

}  // namespace
}  // namespace stoker

STOKER_API int32_t stoker_add_rows(const stoker_rows_call* call) {
  using namespace stoker;
  return guarded([&] {
    const Dropout dropout(call->p, call->key);
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      parallel_ranges(call->rows, threads_for(call->rows * call->columns, call->threads), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (dropout.active())
            drop<Scalar>(*call, dropout, row);
          else if (!call->y)
            copy<Scalar>(*call, row);
          else
            for_dtype(call->y_dtype, [&](auto* y) {
              using Other = std::remove_pointer_t<decltype(y)>;
              call->x ? add<Scalar, Other>(*call, row) : convert<Scalar, Other>(*call, row);
            });
        }
      });
    });
  });
}

STOKER_API int32_t stoker_scale_rows(const stoker_scale_call* call) {
  using namespace stoker;
  return guarded([&] {
    for_dtype(call->dtype, [&](auto* from) {
      for_dtype(call->z_dtype, [&](auto* to) {
        parallel_ranges(call->rows, threads_for(call->rows * call->columns, call->threads), [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row)
            scale<std::remove_pointer_t<decltype(from)>, std::remove_pointer_t<decltype(to)>>(*call, row);
        });
      });
    });
  });
}
