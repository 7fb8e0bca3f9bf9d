// Activations with the bias of the preceding linear folded in, and their gated forms.
//   plain: y = act(x + bias)              dx = dy * act'(x + bias)
//   gated: y = act(gate + b1) * (up + b2)  dgate = dy * (up + b2) * act'(gate + b1),  dup = dy * act(gate + b1)
// Backward computes the activation again from its input; column sums of dx are the gradient of the bias.
#include "core/buffer.h"
#include "core/math.h"
#include "core/parallel.h"
#include "core/reduce.h"
#include "core/types.h"

namespace stoker {

struct Value {
  float value, slope;
};

struct Gelu {
  static inline Value at(float x) {
    const Normal n = normal(x);
    return {x * n.below, n.below + x * n.density};
  }
};

// 0.5 * (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
struct GeluTanh {
  static inline Value at(float x) {
    constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f;
    // Beyond 1e10 the square would overflow; there the slope of the sigmoid is 0 already, and 0 * inf is NaN.
    const float capped = x * x > 1e20f ? 1e20f : x * x;
    const Sigmoid s = sigmoid(kTwice * x * (1.0f + kCubic * capped));
    return {x * s.value, s.value + x * s.slope * (kTwice * (1.0f + 3.0f * kCubic * capped))};
  }
};

// Written so that NaN passes, and with the slope that PyTorch gives NaN.
struct Relu {
  static inline Value at(float x) { return {x <= 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f}; }
};

struct Silu {
  static inline Value at(float x) {
    const Sigmoid s = sigmoid(x);
    return {x * s.value, s.value + x * s.slope};
  }
};

enum Kind : int { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSilu = 3 };  // kernels/activation.py

template <typename F>
static void for_kind(int kind, F&& f) {
  switch (kind) {
    case kGelu: return f(Gelu());
    case kGeluTanh: return f(GeluTanh());
    case kRelu: return f(Relu());
    default: return f(Silu());
  }
}

// Rows may be halves of longer rows, hence a stride for each side.
template <typename Scalar>
struct Rows {
  Scalar* data;
  int64_t stride;
  Scalar* operator[](int64_t row) const { return data + row * stride; }
};

template <typename Act, typename Scalar>
static void forward(Rows<const Scalar> x, Rows<const Scalar> up, const float* x_bias, const float* up_bias, Scalar* y,
                    int64_t rows, int64_t columns, int threads) {
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Scalar* from = x[row];
      Scalar* to = y + row * columns;
      if (up.data) {
        const Scalar* by = up[row];
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i)
          store(to + i, Act::at(load(from[i]) + x_bias[i]).value * (load(by[i]) + up_bias[i]));
      } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) store(to + i, Act::at(load(from[i]) + x_bias[i]).value);
      }
    }
  });
}

enum { kInput, kUp };

template <typename Act, typename Scalar>
static void backward(const Scalar* dy, Rows<const Scalar> x, Rows<const Scalar> up, const float* x_bias,
                     const float* up_bias, Rows<Scalar> dx, Rows<Scalar> dup, const ColumnSums& sums, int64_t rows,
                     int64_t columns, int threads) {
  parallel_tasks(sums.count, threads_for(rows * columns, threads), [&](int64_t block) {
    float* dbias = sums.start(block, kInput);
    float* dup_bias = up.data ? sums.start(block, kUp) : nullptr;
    for (int64_t row = block * sums.size; row < std::min(rows, (block + 1) * sums.size); ++row) {
      const Scalar *from = x[row], *grad = dy + row * columns;
      Scalar* to = dx[row];
      if (up.data) {
        const Scalar* by = up[row];
        Scalar* to_up = dup[row];
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          const float g = load(grad[i]);
          const Value act = Act::at(load(from[i]) + x_bias[i]);
          const float d = g * (load(by[i]) + up_bias[i]) * act.slope, d_up = g * act.value;
          store(to + i, d);
          store(to_up + i, d_up);
          dbias[i] += d;
          dup_bias[i] += d_up;
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          const float d = load(grad[i]) * Act::at(load(from[i]) + x_bias[i]).slope;
          store(to + i, d);
          dbias[i] += d;
        }
      }
    }
  });
}

}  // namespace stoker

// `up` null: the plain form. Strides count elements.
STOKER_API void stoker_activation_forward(const void* x, int64_t x_stride, const void* up, int64_t up_stride,
                                          const void* x_bias, const void* up_bias, void* y, int64_t rows,
                                          int64_t columns, int kind, int dtype, int bias_dtype, int threads) {
  using namespace stoker;
  const Buffer<float> wide = widen(x_bias, bias_dtype, columns), wide_up = widen(up_bias, bias_dtype, columns);
  for_dtype(dtype, [&](auto* tag) {
    using Scalar = std::remove_pointer_t<decltype(tag)>;
    const Rows<const Scalar> from{static_cast<const Scalar*>(x), x_stride}, by{static_cast<const Scalar*>(up), up_stride};
    for_kind(kind, [&](auto act) {
      forward<decltype(act)>(from, by, wide.get(), wide_up.get(), static_cast<Scalar*>(y), rows, columns, threads);
    });
  });
}

STOKER_API void stoker_activation_backward(const void* dy, const void* x, int64_t x_stride, const void* up,
                                           int64_t up_stride, const void* x_bias, const void* up_bias, void* dx,
                                           int64_t dx_stride, void* dup, int64_t dup_stride, void* dbias,
                                           void* dup_bias, int64_t rows, int64_t columns, int kind, int dtype,
                                           int bias_dtype, int threads) {
  using namespace stoker;
  const Buffer<float> wide = widen(x_bias, bias_dtype, columns), wide_up = widen(up_bias, bias_dtype, columns);
  const ColumnSums sums(rows, columns, up ? 2 : 1);
  for_dtype(dtype, [&](auto* tag) {
    using Scalar = std::remove_pointer_t<decltype(tag)>;
    const Rows<const Scalar> from{static_cast<const Scalar*>(x), x_stride}, by{static_cast<const Scalar*>(up), up_stride};
    const Rows<Scalar> to{static_cast<Scalar*>(dx), dx_stride}, to_up{static_cast<Scalar*>(dup), dup_stride};
    for_kind(kind, [&](auto act) {
      backward<decltype(act)>(static_cast<const Scalar*>(dy), from, by, wide.get(), wide_up.get(), to, to_up, sums, rows,
                              columns, threads);
    });
  });
  sums.finish(kInput, dbias, bias_dtype, threads);
  if (up) sums.finish(kUp, dup_bias, bias_dtype, threads);
}
