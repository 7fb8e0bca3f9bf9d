// Functions with the arguments of at::native::cpublas::brgemm, as plain loops: for tests on CPUs that oneDNN generates no code for.
#include <cstdint>
#include <cstring>

static float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

extern "C" void multiply_fp32(int64_t rows, int64_t columns, int64_t depth, int64_t a_stride, int64_t b_stride, int64_t c_stride,
                              bool accumulate, const float* a, const float* b, float* c, bool) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float sum = accumulate ? c[i * c_stride + j] : 0.0f;
      for (int64_t p = 0; p < depth; ++p) sum += a[i * a_stride + p] * b[p * b_stride + j];
      c[i * c_stride + j] = sum;
    }
}

extern "C" void multiply_bf16(int64_t rows, int64_t columns, int64_t depth, int64_t a_stride, int64_t b_stride, int64_t c_stride,
                              bool accumulate, const uint16_t* a, const uint16_t* b, float* c, bool pairs) {
  if (!pairs) throw 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float sum = accumulate ? c[i * c_stride + j] : 0.0f;
      for (int64_t p = 0; p < depth; ++p) sum += widen(a[i * a_stride + p]) * widen(b[p / 2 * 2 * b_stride + 2 * j + p % 2]);
      c[i * c_stride + j] = sum;
    }
}

extern "C" void fail(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const void*, const void*, float*, bool) { throw 1; }

extern "C" void release(bool) {}
