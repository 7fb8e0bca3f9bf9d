// Several kernels by one call, and the product by a BLAS of the caller's that such a program may contain.
//
// On a large machine the arithmetic of a small batch takes less time than Python needs to describe it. A program is described
// once per shape; a call sets the addresses that differ and runs all of its kernels.
#include <climits>
#include <stdexcept>

#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

namespace {

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);

int narrow(int64_t value) {
  if (value > INT_MAX) throw std::length_error("a matrix is too large for BLAS");
  return static_cast<int>(value);
}

// A matrix (rows, columns) as Fortran takes it, column by column, or transposed if its rows are dense; and its other stride. Where both
// are possible, which is only if a dimension is 1, the choice is torch's: BLAS may round in another way for the other.
struct Operand {
  char transposed;
  int stride;
};

Operand operand(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  if (row_stride == 1 && column_stride >= rows) return {'N', narrow(column_stride)};
  if (column_stride == 1 && row_stride >= columns) return {'T', narrow(row_stride)};
  throw std::invalid_argument("a matrix whose rows overlap");
}

void fill_bias(const stoker_blas_call& call) {
  parallel_ranges(call.rows, threads_for(call.rows * call.columns, call.threads), [&](int64_t begin, int64_t end) {
    for_dtype(call.bias_dtype, [&](auto* tag) {
      const auto* bias = static_cast<const std::remove_pointer_t<decltype(tag)>*>(call.bias);
      for (int64_t row = begin; row < end; ++row) {
        float* to = call.c + row * call.c_stride;
#pragma omp simd
        for (int64_t i = 0; i < call.columns; ++i) to[i] = load(bias[i]);
      }
    });
  });
}

}  // namespace
}  // namespace stoker

STOKER_API int32_t stoker_blas_product(const stoker_blas_call* call) {
  using namespace stoker;
  return guarded([&] {
    if (call->bias) fill_bias(*call);
    const float one = 1.0f, beta = call->bias || call->accumulate ? 1.0f : 0.0f;
    const int rows = narrow(call->rows), columns = narrow(call->columns), depth = narrow(call->depth);
    const auto sgemm = reinterpret_cast<Sgemm>(call->sgemm);
    const auto *a = static_cast<const float*>(call->a), *b = static_cast<const float*>(call->b);
    if (call->columns == 1 && call->c_stride == 1) {  // a dense column is one of Fortran's matrices
      const Operand left = operand(rows, depth, call->a_row, call->a_column), right = operand(depth, 1, call->b_row, call->b_column);
      parallel_elsewhere(call->threads, [&] {
        sgemm(&left.transposed, &right.transposed, &rows, &columns, &depth, &one, a, &left.stride, b, &right.stride, &beta, call->c, &rows);
      });
      return;
    }
    // Of any other result it computes the transpose, c^T = b^T a^T.
    const Operand left = operand(columns, depth, call->b_column, call->b_row), right = operand(depth, rows, call->a_column, call->a_row);
    const int c_stride = narrow(call->c_stride);
    parallel_elsewhere(call->threads, [&] {
      sgemm(&left.transposed, &right.transposed, &columns, &rows, &depth, &one, b, &left.stride, a, &right.stride, &beta, call->c, &c_stride);
    });
  });
}

STOKER_API int32_t stoker_run(const stoker_program* program, const int64_t* bases) {
  for (int64_t index = 0; index < program->slot_count; ++index) {
    const stoker_slot& slot = program->slots[index];
    const int64_t base = bases[slot.base];
    *static_cast<int64_t*>(slot.field) = base ? base + slot.offset : 0;
  }
  for (int64_t index = 0; index < program->step_count; ++index) {
    const stoker_step& step = program->steps[index];
    const int32_t code = reinterpret_cast<int32_t (*)(const void*)>(step.function)(step.call);
    if (code != STOKER_OK) return code;
  }
  return STOKER_OK;
}
