// Vectors of the native width of one instruction set, for kernels whose results may differ between them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "tree_attention.h"

namespace fastspec::cpu::FASTSPEC_ISA::lanes {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kLogLanes = 4;
constexpr int kRegisters = 32;
#define FASTSPEC_LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define FASTSPEC_HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kLogLanes = 3;
constexpr int kRegisters = 16;
#define FASTSPEC_LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define FASTSPEC_HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int kLanes = 4;
constexpr int kLogLanes = 2;
constexpr int kRegisters = 16;
#define FASTSPEC_LOW_HALVES 0, 4, 1, 5
#define FASTSPEC_HIGH_HALVES 2, 6, 3, 7
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

#if defined(__clang__)
#define FASTSPEC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FASTSPEC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const BFloat16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  return reinterpret_cast<Floats>(__builtin_convertvector(x, Words) << 16);
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// A subnormal is made normal by an implicit one, which is then subtracted.
inline float to_float(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7FFFu) << 13;
  const uint32_t exponent = magnitude & 0x0F800000u;
  uint32_t bits = magnitude + (exponent == 0x0F800000u ? 0x70000000u : 0x38000000u);
  float y;
  if (exponent == 0) {
    bits += 0x00800000u;
    std::memcpy(&y, &bits, sizeof y);
    y -= 0x1p-14f;
    std::memcpy(&bits, &y, sizeof y);
  }
  bits |= (x.bits & 0x8000u) << 16;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xFFFF, halves));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(from[i]);
  return x;
#endif
}

// The first `count` < kLanes elements, zeros after them.
template <typename T>
inline Floats load_partial(const T* from, int64_t count) {
  Floats x = {};
  for (int64_t i = 0; i < count; ++i) x[i] = to_float(from[i]);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void convert(float x, float* to) { *to = x; }

inline void convert(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40u);
}

// To nearest even; adding 0.5 rounds what becomes subnormal to multiples of 2^-24.
inline void convert(float x, Float16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7FFFFFFFu;
  uint32_t half;
  if (bits > 0x7F800000u) {
    half = 0x7E00u;
  } else if (bits >= 0x477FF000u) {
    half = 0x7C00u;
  } else if (bits < 0x38800000u) {
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof bits);
    magnitude += 0.5f;
    std::memcpy(&half, &magnitude, sizeof half);
    half -= 0x3F000000u;
  } else {
    half = (bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(a, b, c));
#elif defined(__FMA__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(a, b, c));
#else
  return a * b + c;
#endif
}

inline float largest(Floats x) {
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
  }
  return lane[0];
}

inline float total(const float* lane_sums) {
  float lane[kLanes];
  std::memcpy(lane, lane_sums, sizeof lane);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// 2^x to 1 ulp for x <= 127, 0 below the normal numbers, NaN for NaN. Exactly 1 at 0.
inline Floats exp2(Floats x) {
  const Floats clamped = x < -126.0f ? broadcast(-126.0f) : x;
  const Floats shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the integer part sits in the low bits
  const Floats fraction = clamped - (shifted - 12582912.0f);
  const Floats scale =
      reinterpret_cast<Floats>((reinterpret_cast<Words>(shifted) << 23) + 0x3F800000u);
  Floats y = broadcast(1.5461447e-4f);
  y = multiply_add(y, fraction, broadcast(1.3390867e-3f));
  y = multiply_add(y, fraction, broadcast(9.618057e-3f));
  y = multiply_add(y, fraction, broadcast(5.550357e-2f));
  y = multiply_add(y, fraction, broadcast(2.4022651e-1f));
  y = multiply_add(y, fraction, broadcast(6.9314718e-1f));
  y = multiply_add(y, fraction, broadcast(1.0f));
  return x < -126.0f ? Floats{} : y * scale;
}

inline float exp2(float x) { return exp2(broadcast(x))[0]; }

// Rows i of a kLanes x kLanes block become columns i: log2(kLanes) perfect shuffles.
inline void transpose(Floats (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 0; stage < kLogLanes; ++stage) {
    Floats mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = FASTSPEC_SHUFFLE(rows[i], rows[i + kLanes / 2], FASTSPEC_LOW_HALVES);
      mixed[2 * i + 1] = FASTSPEC_SHUFFLE(rows[i], rows[i + kLanes / 2], FASTSPEC_HIGH_HALVES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

}  // namespace fastspec::cpu::FASTSPEC_ISA::lanes
