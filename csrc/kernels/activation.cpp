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

// Each activation in two steps, the exponential and the rest, which run as two loops over a piece of a row: in one loop the
// chain of dependent instructions is so long that a core cannot hold enough of them in flight (1.5 times slower).
struct Gelu {
  static inline float step(float x) { return normal_exp(x); }
  static inline Value at(float x, float e) {
    const Normal n = normal(x, e);
    return {x * n.below, n.below + x * n.density};
  }
};

// 0.5 * (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f;
  // Beyond 1e10 the square would overflow; there the slope of the sigmoid is 0 already, and 0 * inf is NaN.
  static inline float square(float x) { return x * x > 1e20f ? 1e20f : x * x; }
  static inline float step(float x) { return sigmoid_exp(kTwice * x * (1.0f + kCubic * square(x))); }
  static inline Value at(float x, float e) {
    const Sigmoid s = sigmoid(x, e);  // x has the sign of u
    return {x * s.value, s.value + x * s.slope * (kTwice * (1.0f + 3.0f * kCubic * square(x)))};
  }
};

// Written so that NaN passes, and with the slope that PyTorch gives NaN.
struct Relu {
  static inline float step(float) { return 0.0f; }
  static inline Value at(float x, float) { return {x <= 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f}; }
};

struct Silu {
  static inline float step(float x) { return sigmoid_exp(x); }
  static inline Value at(float x, float e) {
    const Sigmoid s = sigmoid(x, e);
    return {x * s.value, s.value + x * s.slope};
  }
};

template <typename F>
static void for_kind(int kind, F&& f) {
  switch (kind) {
    case STOKER_GELU: return f(Gelu());
    case STOKER_GELU_TANH: return f(GeluTanh());
    case STOKER_RELU: return f(Relu());
    default: return f(Silu());
  }
}

// Rows may be halves of longer rows, hence the stride. `present` is false for the second half if the activation is not gated;
// the address cannot say so, because that of an empty tensor is null, too.
template <typename Scalar>
struct Rows {
  Scalar* data;
  int64_t stride;
  bool present;
  Scalar* operator[](int64_t row) const { return data + row * stride; }
};

// The biases as fp32, zeros where there is none.
struct Biases {
  explicit Biases(const stoker_activation_call& call)
      : x(widen(call.x_bias, call.bias_dtype, call.columns)), up(widen(call.up_bias, call.bias_dtype, call.columns)) {}
  const Buffer<float> x, up;
};

constexpr int64_t kPiece = 512;

// Rows are taken in pieces that stay in the first-level cache, and every loop over a piece does one thing in fp32: mixed with
// bf16 conversions the compiler works on 16 elements at once and runs out of registers.
template <typename Scalar>
static void widen_piece(const Scalar* from, const float* bias, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]) + bias[i];
}

static const float* as_floats(const float* from, int64_t, float*) { return from; }

static const float* as_floats(const bf16* from, int64_t count, float* scratch) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) scratch[i] = load(from[i]);
  return scratch;
}

// Where to compute a result: in place, or in `scratch` for narrow() to round.
static float* destination(float* to, float*) { return to; }
static float* destination(bf16*, float* scratch) { return scratch; }
static void narrow(const float*, float*, int64_t) {}
static void narrow(const float* scratch, bf16* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(to + i, scratch[i]);
}

struct Pieces {
  alignas(64) float x[kPiece], up[kPiece], e[kPiece], dy[kPiece], out[kPiece], out_up[kPiece];
};

template <typename Act, typename Scalar>
static void load_piece(const Scalar* x, const Scalar* up, const float* x_bias, const float* up_bias, int64_t count,
                       Pieces& piece) {
  if (up) widen_piece(up, up_bias, count, piece.up);
  if constexpr (std::is_same_v<Act, Relu>) {
    widen_piece(x, x_bias, count, piece.x);
  } else if constexpr (std::is_same_v<Scalar, float>) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      piece.x[i] = x[i] + x_bias[i];
      piece.e[i] = Act::step(piece.x[i]);
    }
  } else {
    widen_piece(x, x_bias, count, piece.x);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) piece.e[i] = Act::step(piece.x[i]);
  }
}

template <typename Act, typename Scalar>
static void forward(Rows<const Scalar> x, Rows<const Scalar> up, const Biases& bias, Scalar* y, int64_t rows,
                    int64_t columns, int threads) {
  const float *x_bias = bias.x.get(), *up_bias = bias.up.get();
  parallel_ranges(rows, threads_for(rows * columns, threads), [&](int64_t begin, int64_t end) {
    Pieces piece;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < columns; first += kPiece) {
        const int64_t count = std::min(kPiece, columns - first);
        load_piece<Act>(x[row] + first, up.present ? up[row] + first : nullptr, x_bias + first, up_bias + first, count, piece);
        Scalar* to = y + row * columns + first;
        float* out = destination(to, piece.out);
        if (up.present) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = Act::at(piece.x[i], piece.e[i]).value * piece.up[i];
        } else {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) out[i] = Act::at(piece.x[i], piece.e[i]).value;
        }
        narrow(out, to, count);
      }
    }
  });
}

enum { kInput, kUp };

template <typename Act, typename Scalar>
static void backward(const Scalar* dy, Rows<const Scalar> x, Rows<const Scalar> up, const Biases& bias, Rows<Scalar> dx,
                     Rows<Scalar> dup, const ColumnSums& sums, int64_t rows, int64_t columns, int threads) {
  const float *x_bias = bias.x.get(), *up_bias = bias.up.get();
  parallel_tasks(sums.count, threads_for(rows * columns, threads), [&](int64_t block) {
    Pieces piece;
    sums.run(block, [&](int64_t begin, int64_t end, float* const* bias_sums) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t first = 0; first < columns; first += kPiece) {
          const int64_t count = std::min(kPiece, columns - first);
          load_piece<Act>(x[row] + first, up.present ? up[row] + first : nullptr, x_bias + first, up_bias + first, count, piece);
          const float* g = as_floats(dy + row * columns + first, count, piece.dy);
          float* dbias = bias_sums[kInput] + first;
          Scalar* to = dx[row] + first;
          float* out = destination(to, piece.out);
          if (up.present) {
            Scalar* to_up = dup[row] + first;
            float* out_up = destination(to_up, piece.out_up);
            float* dup_bias = bias_sums[kUp] + first;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              const Value act = Act::at(piece.x[i], piece.e[i]);
              out[i] = g[i] * piece.up[i] * act.slope;
              out_up[i] = g[i] * act.value;
              dbias[i] += out[i];
              dup_bias[i] += out_up[i];
            }
            narrow(out_up, to_up, count);
          } else {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
              out[i] = g[i] * Act::at(piece.x[i], piece.e[i]).slope;
              dbias[i] += out[i];
            }
          }
          narrow(out, to, count);
        }
      }
    });
  });
}

}  // namespace stoker

STOKER_API int32_t stoker_activation_forward(const stoker_activation_call* call) {
  using namespace stoker;
  return guarded([&] {
    const Biases bias(*call);
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      const Rows<const Scalar> x{static_cast<const Scalar*>(call->x), call->x_stride, true};
      const Rows<const Scalar> up{static_cast<const Scalar*>(call->up), call->up_stride, call->gated != 0};
      for_kind(call->kind, [&](auto act) {
        forward<decltype(act)>(x, up, bias, static_cast<Scalar*>(call->y), call->rows, call->columns, call->threads);
      });
    });
  });
}

STOKER_API int32_t stoker_activation_backward(const stoker_activation_call* call) {
  using namespace stoker;
  return guarded([&] {
    const Biases bias(*call);
    const ColumnSums sums(call->rows, call->columns, {true, call->gated != 0}, call->threads);
    for_dtype(call->dtype, [&](auto* tag) {
      using Scalar = std::remove_pointer_t<decltype(tag)>;
      const Rows<const Scalar> x{static_cast<const Scalar*>(call->x), call->x_stride, true};
      const Rows<const Scalar> up{static_cast<const Scalar*>(call->up), call->up_stride, call->gated != 0};
      const Rows<Scalar> dx{static_cast<Scalar*>(call->dx), call->dx_stride, true};
      const Rows<Scalar> dup{static_cast<Scalar*>(call->dup), call->dup_stride, call->gated != 0};
      for_kind(call->kind, [&](auto act) {
        backward<decltype(act)>(static_cast<const Scalar*>(call->dy), x, up, bias, dx, dup, sums, call->rows, call->columns,
                                call->threads);
      });
    });
    sums.finish({{kInput, call->dx_bias, call->bias_dtype}, {kUp, call->gated ? call->dup_bias : nullptr, call->bias_dtype}},
                call->threads);
  });
}
