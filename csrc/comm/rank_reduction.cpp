#include "comm/rank_reduction.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/types.h"

namespace stoker::comm {
namespace {

struct f16 {
  std::uint16_t bits;
};

struct boolean {
  std::uint8_t value;
};

constexpr std::int64_t kBlock = 1024;  // accumulators of one block: 4 to 8 KB, in the first-level cache

// widen(): storage to accumulator, a block at a time; narrow(): back, rounding to nearest even.
template <typename T>
struct Storage {
  using Wide = T;
  static void widen(const T* from, Wide* to, std::int64_t n) { std::memcpy(to, from, n * sizeof(T)); }
  static void narrow(const Wide* from, T* to, std::int64_t n) { std::memcpy(to, from, n * sizeof(T)); }
};

template <>
struct Storage<boolean> {
  using Wide = std::uint8_t;
  static void widen(const boolean* from, Wide* to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i].value != 0;
  }
  static void narrow(const Wide* from, boolean* to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[i].value = from[i] != 0;
  }
};

template <>
struct Storage<bf16> {
  using Wide = float;
  static void widen(const bf16* from, float* to, std::int64_t n) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
  }
  static void narrow(const float* from, bf16* to, std::int64_t n) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) store(to + i, from[i]);
  }
};

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  std::uint32_t exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24, exact
    return sign ? -tiny : tiny;
  }
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::uint16_t float_to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (bits < 0x38800000u) {                        // below the smallest normal half: round in units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    const float shifted = magnitude + 0.5f;  // the sum's unit in the last place is 2^-24
    std::uint32_t sum;
    std::memcpy(&sum, &shifted, sizeof(sum));
    return static_cast<std::uint16_t>(sign | (sum - 0x3f000000u));
  }
  const std::uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

template <>
struct Storage<f16> {
  using Wide = float;
  static void widen(const f16* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) to[i] = half_to_float(from[i].bits);
  }
  static void narrow(const float* from, f16* to, std::int64_t n) {
    std::int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) to[i].bits = float_to_half(from[i]);
  }
};

template <int op, typename W>
inline W combine(W a, W b) {
  if constexpr (std::is_integral_v<W> && (op == STOKER_SUM || op == STOKER_PRODUCT)) {
    using Bits = std::common_type_t<std::make_unsigned_t<W>, unsigned>;  // integers wrap around, as torch's do
    const Bits x = static_cast<Bits>(a), y = static_cast<Bits>(b);
    return static_cast<W>(op == STOKER_SUM ? x + y : x * y);
  }
  if constexpr (op == STOKER_SUM || op == STOKER_AVG) return static_cast<W>(a + b);
  if constexpr (op == STOKER_PRODUCT) return static_cast<W>(a * b);
  // `!(a <= b)` and not `a > b`, so that a NaN on either side is the result.
  if constexpr (op == STOKER_MIN) return a != a ? a : (!(b >= a) ? b : a);
  if constexpr (op == STOKER_MAX) return a != a ? a : (!(b <= a) ? b : a);
  if constexpr (std::is_integral_v<W>) {
    if constexpr (op == STOKER_BAND) return static_cast<W>(a & b);
    if constexpr (op == STOKER_BOR) return static_cast<W>(a | b);
    if constexpr (op == STOKER_BXOR) return static_cast<W>(a ^ b);
  }
  return a;
}

template <typename T, int op>
void run(const void* const* sources, int ranks, void* out, std::int64_t count) {
  using Wide = typename Storage<T>::Wide;
  constexpr bool kPlain = std::is_same_v<Wide, T>;  // no conversion: two ranks are reduced in one pass, without a buffer
  if constexpr (kPlain && op != STOKER_AVG) {
    if (ranks == 2) {
      const T* a = static_cast<const T*>(sources[0]);
      const T* b = static_cast<const T*>(sources[1]);
      T* to = static_cast<T*>(out);
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) to[i] = combine<op>(a[i], b[i]);
      return;
    }
  }
  if constexpr (std::is_same_v<T, bf16> && op != STOKER_AVG) {
    if (ranks == 2) {
      const bf16* a = static_cast<const bf16*>(sources[0]);
      const bf16* b = static_cast<const bf16*>(sources[1]);
      bf16* to = static_cast<bf16*>(out);
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) store(to + i, combine<op>(load(a[i]), load(b[i])));
      return;
    }
  }
  alignas(64) Wide total[kBlock], next[kBlock];
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const std::int64_t n = std::min(kBlock, count - start);
    Storage<T>::widen(static_cast<const T*>(sources[0]) + start, total, n);
    for (int rank = 1; rank < ranks; ++rank) {
      const Wide* operand = next;
      if constexpr (kPlain)
        operand = static_cast<const Wide*>(sources[rank]) + start;
      else
        Storage<T>::widen(static_cast<const T*>(sources[rank]) + start, next, n);
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) total[i] = combine<op>(total[i], operand[i]);
    }
    if constexpr (op == STOKER_AVG) {
      const Wide divisor = static_cast<Wide>(ranks);
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) total[i] = static_cast<Wide>(total[i] / divisor);
    }
    Storage<T>::narrow(total, static_cast<T*>(out) + start, n);
  }
}

template <typename T>
void for_op(int op, const void* const* sources, int ranks, void* out, std::int64_t count) {
  switch (op) {
    case STOKER_SUM: return run<T, STOKER_SUM>(sources, ranks, out, count);
    case STOKER_AVG: return run<T, STOKER_AVG>(sources, ranks, out, count);
    case STOKER_PRODUCT: return run<T, STOKER_PRODUCT>(sources, ranks, out, count);
    case STOKER_MIN: return run<T, STOKER_MIN>(sources, ranks, out, count);
    case STOKER_MAX: return run<T, STOKER_MAX>(sources, ranks, out, count);
    case STOKER_BAND: return run<T, STOKER_BAND>(sources, ranks, out, count);
    case STOKER_BOR: return run<T, STOKER_BOR>(sources, ranks, out, count);
    case STOKER_BXOR: return run<T, STOKER_BXOR>(sources, ranks, out, count);
  }
}

// As in torch, a sum of booleans is true if any is, a product if all are.
int boolean_op(int op) {
  if (op == STOKER_SUM || op == STOKER_MAX) return STOKER_BOR;
  if (op == STOKER_PRODUCT || op == STOKER_MIN) return STOKER_BAND;
  return op;
}

struct Named {
  const char* name;
  int size;
};
constexpr Named kNames[] = {{"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float16", 2}, {"int8", 1},
                            {"uint8", 1},   {"int16", 2},   {"int32", 4},    {"int64", 8},   {"bool", 1}};
constexpr const char* kOpNames[] = {"sum", "avg", "product", "min", "max", "and", "or", "xor"};

}  // namespace

int size_of(int type) { return type >= 0 && type < int(std::size(kNames)) ? kNames[type].size : 0; }
const char* type_name(int type) { return type >= 0 && type < int(std::size(kNames)) ? kNames[type].name : "bytes"; }
const char* op_name(int op) { return op >= 0 && op < int(std::size(kOpNames)) ? kOpNames[op] : "none"; }

bool reducible(int type, int op) {
  if (!size_of(type) || op < 0 || op >= int(std::size(kOpNames))) return false;
  if (op >= STOKER_BAND) return type >= STOKER_INT8;
  return op != STOKER_AVG || type < STOKER_INT8;  // the mean of integers is rarely an integer
}

void reduce(int type, int op, const void* const* sources, int ranks, void* out, std::int64_t count) {
  switch (type) {
    case STOKER_FLOAT32: return for_op<float>(op, sources, ranks, out, count);
    case STOKER_FLOAT64: return for_op<double>(op, sources, ranks, out, count);
    case STOKER_BFLOAT16: return for_op<bf16>(op, sources, ranks, out, count);
    case STOKER_FLOAT16: return for_op<f16>(op, sources, ranks, out, count);
    case STOKER_INT8: return for_op<std::int8_t>(op, sources, ranks, out, count);
    case STOKER_UINT8: return for_op<std::uint8_t>(op, sources, ranks, out, count);
    case STOKER_INT16: return for_op<std::int16_t>(op, sources, ranks, out, count);
    case STOKER_INT32: return for_op<std::int32_t>(op, sources, ranks, out, count);
    case STOKER_INT64: return for_op<std::int64_t>(op, sources, ranks, out, count);
    case STOKER_BOOL: return for_op<boolean>(boolean_op(op), sources, ranks, out, count);
  }
}

}  // namespace stoker::comm
