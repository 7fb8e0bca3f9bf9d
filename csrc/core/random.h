// Counter-based random numbers for dropout: Philox4x32 with 7 rounds (the fewest that pass BigCrush, Salmon et al. 2011).
//
// A decision is a pure function of (key, row, column): the same for any thread count, tiling or instruction set, and
// recomputed in backward instead of stored. The key is drawn from torch's generator by the caller, once per operator call.
// Each decision takes 16 bits: an element is dropped when its number is below threshold = round(p * 65536). The rate is
// therefore threshold / 65536 (0.100006 for p = 0.1), and the survivors are scaled by exactly 1 / (1 - that).
//
// Columns come in groups of 64. Within a group eight counters run side by side, one per SIMD lane, and give 4 words of two
// halves each: column 8 * (2 * word + half) + lane. So eight neighbouring columns sit in one vector and nothing is shuffled.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace stoker {

constexpr int kRandomGroup = 64;

struct Dropout {
  uint64_t key = 0;
  uint32_t threshold = 0;  // of 65536
  float scale = 1.0f;      // of the survivors

  Dropout() = default;
  Dropout(float p, uint64_t key_) : key(key_) {
    threshold = static_cast<uint32_t>(p * 65536.0f + 0.5f);
    // p = 1 drops everything; the scale would be infinite, and 0 * inf is NaN.
    scale = threshold >= 65536 ? 0.0f : 65536.0f / static_cast<float>(65536 - threshold);
  }
  bool active() const { return threshold != 0; }
};

typedef uint32_t u32x8 __attribute__((vector_size(32)));

#if !defined(__AVX2__)
inline void multiply_wide(u32x8 a, uint32_t b, u32x8& high, u32x8& low) {
  for (int lane = 0; lane < 8; ++lane) {
    const uint64_t product = static_cast<uint64_t>(a[lane]) * b;
    high[lane] = static_cast<uint32_t>(product >> 32);
    low[lane] = static_cast<uint32_t>(product);
  }
}
#endif

// The four words of the eight counters of one column group. Even and odd lanes run as two chains, each counter in the lower half
// of 64 bits: the product instruction ignores the upper half, so nothing has to be put together before the end.
inline void philox_group(uint64_t key, uint64_t row, uint32_t group, u32x8 words[4]) {
#if defined(__AVX2__)
  const uint32_t first = group * 8u;
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int odd = 0; odd < 2; ++odd) {
    c0[odd] = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_set_epi64x(6 + odd, 4 + odd, 2 + odd, odd));
    c1[odd] = _mm256_setzero_si256();
    c2[odd] = _mm256_set1_epi64x(static_cast<uint32_t>(row));
    c3[odd] = _mm256_set1_epi64x(static_cast<uint32_t>(row >> 32));
  }
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53u), m1 = _mm256_set1_epi64x(0xCD9E8D57u);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    const __m256i vk0 = _mm256_set1_epi64x(k0), vk1 = _mm256_set1_epi64x(k1);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m256i p0 = _mm256_mul_epu32(c0[odd], m0), p1 = _mm256_mul_epu32(c2[odd], m1);
      c0[odd] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[odd], vk0));
      c2[odd] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[odd], vk1));
      c1[odd] = p1;
      c3[odd] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const auto join = [](const __m256i* pair) {
    return (u32x8)_mm256_blend_epi32(pair[0], _mm256_slli_epi64(pair[1], 32), 0xaa);
  };
  words[0] = join(c0);
  words[1] = join(c1);
  words[2] = join(c2);
  words[3] = join(c3);
#else
  const u32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  const u32x8 zero = {};
  u32x8 c0 = lanes + group * 8u;
  u32x8 c1 = zero;
  u32x8 c2 = zero + static_cast<uint32_t>(row);
  u32x8 c3 = zero + static_cast<uint32_t>(row >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    u32x8 high0, low0, high1, low1;
    multiply_wide(c0, 0xD2511F53u, high0, low0);
    multiply_wide(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
#endif
}

// Writes the factor of each column in [group * 64, group * 64 + 64): 0 where dropped, `scale` where kept.
inline void dropout_factors(const Dropout& dropout, uint64_t row, uint32_t group, float* factors /* 64 */) {
  typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
  u32x8 words[4];
  philox_group(dropout.key, row, group, words);
  const u32x8 zero = {};
  const u32x8 threshold = zero + dropout.threshold;
  union {
    float f;
    uint32_t u;
  } scale = {dropout.scale};
  for (int word = 0; word < 4; ++word) {
    const u32x8 halves[2] = {words[word] & 0xffffu, words[word] >> 16};
    for (int half = 0; half < 2; ++half) {
      const u32x8 keep = (u32x8)(halves[half] >= threshold);  // all ones where kept
      *reinterpret_cast<f32x8*>(factors + 8 * (2 * word + half)) = (f32x8)(keep & scale.u);
    }
  }
}

// The factors of a whole row; the buffer must have room for the last, possibly incomplete, group.
inline void row_factors(const Dropout& dropout, int64_t row, int64_t columns, float* factors) {
  for (int64_t first = 0; first < columns; first += kRandomGroup)
    dropout_factors(dropout, static_cast<uint64_t>(row), static_cast<uint32_t>(first / kRandomGroup), factors + first);
}

}  // namespace stoker
