// Elementary functions written so that a loop calling them vectorises: no branches, no table, no libm.
#pragma once

#include <cstdint>
#include <cstring>

namespace stoker {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// exp(x) for x <= 0, within 2 ulp: 2^n by bits, the rest by a minimax polynomial on [-ln2/2, ln2/2] (relative error 3e-9).
// exp(-inf) = 0, exp(NaN) = NaN; results below 2^-125 become 0. The polynomial is evaluated in pairs, not by Horner's rule:
// the chain of dependent steps is what bounds the speed of a loop around it.
inline float exp_nonpositive(float x) {
  constexpr float kLowest = -86.643397f;  // -125 ln 2
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const float t = x * kLog2e + kRound;
  const float n = t - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  const float r2 = r * r;
  const float high = (0.041668391f + 0.0083687451f * r) + r2 * 0.0013814539f;
  const float p = (1.0f + r) + r2 * ((0.49999993f + 0.1666652f * r) + r2 * high);
  // Twice 2^(n - 1): 2^128, which exp() below can need, does not exist as a float. The shift drops all bits of t but n.
  const float scaled = (p + p) * as_float((as_bits(t) << 23) + (126u << 23));
  return x < kLowest ? 0.0f : scaled;
}

// exp(x) for any x: as above, and exp(inf) = inf.
inline float exp(float x) {
  constexpr float kHighest = 88.72283f;  // log of the largest float
  const float value = exp_nonpositive(x);
  return x > kHighest ? as_float(0x7f800000u) : value;
}

// sigmoid(x) and its slope from e = exp(-|x|): neither 1 - s for s near 1 nor 0 * inf occurs.
struct Sigmoid {
  float value, slope;
};

inline float magnitude(float x) { return as_float(as_bits(x) & 0x7fffffffu); }

inline float sigmoid_exp(float x) { return exp_nonpositive(-magnitude(x)); }

inline Sigmoid sigmoid(float x, float e) {
  const float r = 1.0f / (1.0f + e);
  return {x < 0.0f ? e * r : r, e * (r * r)};
}

// tanh(x) as x P(x^2) / Q(x^2), a minimax fit over |x| <= 9.02, from where it is 1 in fp32 (relative error 2.1e-8, with rounding
// 4e-7). By way of the sigmoid the error would be absolute, 1e-7; times a cap of 50 on scores that is visible in the softmax.
inline float tanh(float x) {
  constexpr float kSaturated = 9.02f;
  x = x > kSaturated ? kSaturated : (x < -kSaturated ? -kSaturated : x);  // NaN passes
  const float y = x * x;
  const float p = 0.9999999792f + y * (0.1337973939f + y * (0.003494059264f + y * (2.058385805e-5f + y * 1.331953961e-8f)));
  const float q = 1.0f + y * (0.4671305468f + y * (0.02587116916f + y * (0.0003283131946f + y * 7.762222292e-7f)));
  return x * p / q;
}

// What GELU needs of the normal distribution: its density and the probability of a smaller value.
struct Normal {
  float density, below;
};

// exp(-x^2 / 2), as a power of two: the square is rounded anyway, so nothing is lost by folding the change of base into it.
// 2^f by a minimax polynomial on [-1/2, 1/2] (relative error 7.5e-8).
inline float normal_exp(float x) {
  constexpr float kRound = 12582912.0f;  // see exp_nonpositive
  const float y = x * -0.72134752f * x;  // -x^2 / 2 * log2(e)
  const float t = y + kRound;
  const float f = y - (t - kRound);
  float p = 0.0013276416f;
  p = p * f + 0.0096755984f;
  p = p * f + 0.0555071387f;
  p = p * f + 0.2402211867f;
  p = p * f + 0.6931469664f;
  p = p * f + 1.0000000719f;
  const float scaled = p * as_float((as_bits(t) << 23) + (127u << 23));
  return y < -126.0f ? 0.0f : scaled;
}

// With e = exp(-x^2 / 2): Phi(-a) = e * t * P(t), t = 1 / (1 + 0.35 a), a = |x|: the exponential that the density needs serves
// both. P is a minimax fit over 0 <= a <= 14 (relative error 1.0e-7 up to a = 2.6, 3.4e-6 in the far tail).
inline Normal normal(float x, float e) {
  const float t = 1.0f / (1.0f + 0.35f * magnitude(x)), t2 = t * t;
  const float even = 0.1397870713f + t2 * (0.1438715573f + t2 * (0.2133965460f + t2 * 0.0450154462f));
  const float odd = 0.1367298796f + t2 * (0.0071527591f + t2 * -0.1859532084f);
  const float tail = (e * t) * (even + t * odd);
  return {0.3989422804f * e, x > 0.0f ? 1.0f - tail : tail};
}

}  // namespace stoker
