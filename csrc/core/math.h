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

// exp(x), within 2 ulp. 2^n by bits, the rest by a polynomial on [-ln2/2, ln2/2]. exp(-inf) = 0, exp(inf) = inf,
// exp(NaN) = NaN; results below the smallest normal number become 0.
inline float exp(float x) {
  constexpr float kLowest = -87.33654f, kHighest = 88.72283f;  // where the result leaves the normal numbers
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const float t = x * kLog2e + kRound;
  const float n = t - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  // Taylor to r^7, Horner: the remainder on this interval is 5e-9 of the result.
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // n in [-126, 128]; 2^128 does not exist as a float, so the scale is applied in two halves.
  const int32_t whole = static_cast<int32_t>(as_bits(t)) - static_cast<int32_t>(0x4b400000u);
  const int32_t half = whole >> 1;
  const float scaled = p * as_float(static_cast<uint32_t>(half + 127) << 23) *
                       as_float(static_cast<uint32_t>(whole - half + 127) << 23);
  const float floored = x < kLowest ? 0.0f : scaled;
  return x > kHighest ? as_float(0x7f800000u) : floored;
}

// sigmoid(x) and its slope, both from exp(-|x|): neither 1 - s for s near 1 nor 0 * inf occurs.
struct Sigmoid {
  float value, slope;
};

inline Sigmoid sigmoid(float x) {
  const float e = exp(x < 0.0f ? x : -x);
  const float r = 1.0f / (1.0f + e);
  return {x < 0.0f ? e * r : r, e * (r * r)};
}

// What GELU needs of the normal distribution: its density and the probability of a smaller value.
struct Normal {
  float density, below;
};

// Phi(-a) = exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + 0.3 a), a >= 0: the exponential that the density needs serves both.
// P is a minimax fit over 0 <= a <= 14 (relative error 1.9e-8 up to a = 2.6, 6.4e-7 in the far tail). In fp32, x * below(x)
// is within 1.1e-7 * max(1, |x|) of GELU over [-12, 12], and within 1.8e-6 of its own size for x in [-6, -0.01].
inline Normal normal(float x) {
  const float a = x < 0.0f ? -x : x;
  const float bell = exp(-0.5f * x * x);
  const float t = 1.0f / (1.0f + 0.3f * a);
  float p = 0.0355721920f;
  p = p * t - 0.1562170457f;
  p = p * t + 0.2035918425f;
  p = p * t - 0.0500800871f;
  p = p * t + 0.1260629868f;
  p = p * t + 0.1008510121f;
  p = p * t + 0.1205767727f;
  p = p * t + 0.1196423364f;
  const float tail = bell * (t * p);
  return {0.3989422804f * bell, x > 0.0f ? 1.0f - tail : tail};
}

}  // namespace stoker
