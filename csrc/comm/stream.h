// Copies that bypass the cache. A store to a cache line that another core read last must fetch and invalidate it first; where
// the cores share no cache, that is several times slower than writing to memory and letting the other core read it there.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace stoker::comm {

// memcpy with non-temporal stores; visible to other cores, in order, when it returns.
inline void stream(void* to, const void* from, std::int64_t bytes) {
#if defined(__SSE2__)
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const std::int64_t head = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(target) & 63u);
  if (bytes < head + 64) {
    std::memcpy(target, source, static_cast<std::size_t>(bytes));
    return;
  }
  std::memcpy(target, source, static_cast<std::size_t>(head));
  std::int64_t at = head;
#if defined(__AVX512F__)
  for (; at + 64 <= bytes; at += 64)  // a whole cache line at once, so none is written in two halves
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(source + at));
#elif defined(__AVX__)
  for (; at + 64 <= bytes; at += 64) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + 32), second);
  }
#else
  for (; at + 16 <= bytes; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
#endif
  std::memcpy(target + at, source + at, static_cast<std::size_t>(bytes - at));
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

}  // namespace stoker::comm
