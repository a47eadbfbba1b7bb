// Vectors of the native width, sixteen lanes made of them, and their loads and stores. Everything
// has internal linkage, because this file is compiled with several sets of machine flags.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"                // these vectors never cross a call
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // raised inside GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"        // likewise
#endif
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FASTSPEC_INLINE inline __attribute__((always_inline))
#define FASTSPEC_INLINE_LAMBDA __attribute__((always_inline))

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif
constexpr int kParts = 16 / kNativeLanes;

typedef float NativeF32 __attribute__((vector_size(kNativeLanes * 4)));
typedef int32_t NativeI32 __attribute__((vector_size(kNativeLanes * 4)));
typedef uint32_t NativeU32 __attribute__((vector_size(kNativeLanes * 4)));
typedef uint16_t NativeU16 __attribute__((vector_size(kNativeLanes * 2)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct F32x16 {
  NativeF32 part[kParts];
};

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

template <class To, class From>
FASTSPEC_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class F>
FASTSPEC_INLINE F32x16 each_part(const F& f) {
  F32x16 out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out.part[i] = f(i);
  return out;
}

// Part by part, because a copy of the whole struct would go through memory in smaller pieces.
FASTSPEC_INLINE F32x16 load(const float* x) {
  return each_part([&](int i) {
    NativeF32 part;
    std::memcpy(&part, x + i * kNativeLanes, sizeof(part));
    return part;
  });
}

FASTSPEC_INLINE void store(float* out, const F32x16& a) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    std::memcpy(out + i * kNativeLanes, &a.part[i], sizeof(NativeF32));
  }
}

#if !defined(__AVX2__)
template <class T>
FASTSPEC_INLINE NativeU32 load_u16(const T* x) {
  NativeU16 narrow;
  std::memcpy(&narrow, x, sizeof(narrow));
  return __builtin_convertvector(narrow, NativeU32);
}
#endif

FASTSPEC_INLINE NativeF32 widen(const BF16* x) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return bit_cast<NativeF32>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#elif defined(__AVX2__)
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return bit_cast<NativeF32>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
#else
  return bit_cast<NativeF32>(load_u16(x) << 16);
#endif
}

FASTSPEC_INLINE NativeF32 widen(const F16* x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  const NativeU32 half = load_u16(x);
  const NativeU32 magnitude = half & 0x7fffu;
  // Exact for normal and subnormal halves: move the bits, then correct the exponent bias.
  NativeU32 wide = bit_cast<NativeU32>(bit_cast<NativeF32>(magnitude << 13) * 0x1p112f);
  const NativeU32 special = bit_cast<NativeU32>(magnitude > 0x7bffu);  // inf and NaN
  wide |= special & 0x7f800000u;
  return bit_cast<NativeF32>(wide | ((half & 0x8000u) << 16));
#endif
}

template <class T>
FASTSPEC_INLINE F32x16 load(const T* x) {
  return each_part([&](int i) { return widen(x + i * kNativeLanes); });
}

// The first `count` < 16 elements, then -inf.
template <class T>
FASTSPEC_INLINE F32x16 load_partial(const T* x, int64_t count) {
  T padded[16] = {};
  std::memcpy(padded, x, count * sizeof(T));
  float lane[16];
  store(lane, load(padded));
  for (int64_t i = count; i < 16; ++i) lane[i] = -kInfinity;
  return load(lane);
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
