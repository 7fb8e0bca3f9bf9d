// All gradients of a model at once: their norm, and their scaling. Many tensors of unequal size are cut into pieces of one
// size, so that all cores stay busy from the first piece of the largest table to the last bias.
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

struct Piece {
  int64_t tensor, begin, end;
};

// The pieces do not depend on the thread count, and neither does what is computed from them.
static std::vector<Piece> pieces_of(const int64_t* sizes, int64_t count) {
  constexpr int64_t kElements = 1 << 15;
  std::vector<Piece> pieces;
  for (int64_t tensor = 0; tensor < count; ++tensor)
    for (int64_t begin = 0; begin < sizes[tensor]; begin += kElements)
      pieces.push_back({tensor, begin, std::min(begin + kElements, sizes[tensor])});
  return pieces;
}

template <typename F>
static void for_pieces(const std::vector<Piece>& pieces, int threads, F&& f) {
  const auto count = static_cast<int64_t>(pieces.size());
  int64_t elements = 0;
  for (const Piece& piece : pieces) elements += piece.end - piece.begin;
  parallel_ranges(count, threads_for(elements, threads), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) f(index, pieces[static_cast<size_t>(index)]);
  });
}

static double sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kRun = 1024;  // fp32 inside a run, fp64 between: as fast as memory, and exact to six digits
  double total = 0.0;
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t end = std::min(first + kRun, count);
    float run = 0.0f;
#pragma omp simd reduction(+ : run)
    for (int64_t i = first; i < end; ++i) run += x[i] * x[i];
    total += run;
  }
  return total;
}

}  // namespace stoker

STOKER_API int32_t stoker_gradient_norm(const float* const* tensors, const int64_t* sizes, int64_t count, double* norm,
                                        int32_t threads) {
  using namespace stoker;
  return guarded([&] {
    const auto pieces = pieces_of(sizes, count);
    std::vector<double> sums(pieces.size());
    for_pieces(pieces, threads, [&](int64_t index, const Piece& piece) {
      sums[static_cast<size_t>(index)] = sum_of_squares(tensors[piece.tensor] + piece.begin, piece.end - piece.begin);
    });
    double total = 0.0;
    for (const double sum : sums) total += sum;
    *norm = std::sqrt(total);
  });
}

STOKER_API int32_t stoker_scale_gradients(float* const* tensors, const int64_t* sizes, int64_t count, float factor,
                                          int32_t threads) {
  using namespace stoker;
  return guarded([&] {
    for_pieces(pieces_of(sizes, count), threads, [&](int64_t, const Piece& piece) {
      float* x = tensors[piece.tensor];
#pragma omp simd
      for (int64_t i = piece.begin; i < piece.end; ++i) x[i] *= factor;
    });
  });
}
