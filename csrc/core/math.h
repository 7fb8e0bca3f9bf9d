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

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace stoker
