// Storage types of the kernels: fp32, and bf16 kept as its upper 16 bits. Arithmetic is always fp32; load() widens,
// store() rounds to nearest even as PyTorch does.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "stoker.h"

namespace stoker {

struct bf16 {
  uint16_t bits;
};

inline float load(float value) { return value; }

inline float load(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void store(float* to, float value) { *to = value; }

inline void store(bf16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could carry a NaN's payload into infinity or zero; PyTorch's quiet NaN is 0x7fc0.
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// Calls f(Scalar*) for the storage type that `dtype` names.
template <typename F>
inline void for_dtype(int dtype, F&& f) {
  if (dtype == STOKER_BFLOAT16)
    f(static_cast<bf16*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

// Calls f(std::true_type) or f(std::false_type): a choice made once, outside the loops that depend on it.
template <typename F>
inline void for_flag(bool flag, F&& f) {
  if (flag)
    f(std::true_type());
  else
    f(std::false_type());
}

}  // namespace stoker
