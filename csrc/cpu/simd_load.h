// Loads of sixteen logits of any type, widened to f32 exactly.
#pragma once
#include "simd.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

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
