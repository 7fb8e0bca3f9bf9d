// Memory for intermediate results: a buffer that lives as long as a call, and rows that each thread keeps.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/types.h"

namespace stoker {

// Uninitialised, aligned to a cache line.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : data_(allocate(count)) {}
  T* get() const { return data_.get(); }
  T& operator[](int64_t index) const { return data_.get()[index]; }

 private:
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };
  static T* allocate(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    void* pointer = std::aligned_alloc(64, bytes ? bytes : 64);
    if (!pointer) throw std::bad_alloc();
    return static_cast<T*>(pointer);
  }
  std::unique_ptr<T, Free> data_;
};

// A row of at least `count` floats that belongs to the calling thread and to `Slot`, kept for the next call: the threads of
// the pool would otherwise allocate one for every block of rows.
template <int Slot>
inline float* thread_row(int64_t count) {
  static thread_local Buffer<float> row;
  static thread_local int64_t size = 0;
  if (size < count) {
    row = Buffer<float>(count);
    size = count;
  }
  return row.get();
}

// A parameter as fp32: `count` values of storage type `dtype`, or `otherwise` in each place where there is none.
inline Buffer<float> widen(const void* values, int dtype, int64_t count, float otherwise = 0.0f) {
  Buffer<float> wide(count);
  float* to = wide.get();
  if (!values) {
    for (int64_t i = 0; i < count; ++i) to[i] = otherwise;
    return wide;
  }
  for_dtype(dtype, [&](auto* tag) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(tag)>*>(values);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
  });
  return wide;
}

}  // namespace stoker
