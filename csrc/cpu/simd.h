// Arithmetic on sixteen lanes: the same lanes, summed in the same order, on any instruction set.
// Only `multiply_add` rounds differently, if the hardware lacks it.
#pragma once
#include "simd_memory.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

FASTSPEC_INLINE NativeF32 native(float value) { return value - NativeF32{}; }

FASTSPEC_INLINE F32x16 broadcast(float value) {
  return each_part([&](int) { return native(value); });
}

FASTSPEC_INLINE F32x16 operator+(const F32x16& a, const F32x16& b) {
  return each_part([&](int i) { return a.part[i] + b.part[i]; });
}

FASTSPEC_INLINE F32x16 operator-(const F32x16& a, const F32x16& b) {
  return each_part([&](int i) { return a.part[i] - b.part[i]; });
}

FASTSPEC_INLINE F32x16 operator*(const F32x16& a, const F32x16& b) {
  return each_part([&](int i) { return a.part[i] * b.part[i]; });
}

// a * b + c, with one rounding if the hardware supports it.
FASTSPEC_INLINE NativeF32 multiply_add(NativeF32 a, NativeF32 b, NativeF32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
  NativeF32 out;
  for (int i = 0; i < kNativeLanes; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}

// The larger value; b if one is NaN. Compilers need two instructions for the comparison on AVX-512.
FASTSPEC_INLINE F32x16 max(const F32x16& a, const F32x16& b) {
  return each_part([&](int i) {
#if defined(__AVX512F__)
    return bit_cast<NativeF32>(_mm512_max_ps(a.part[i], b.part[i]));
#else
    return a.part[i] > b.part[i] ? a.part[i] : b.part[i];
#endif
  });
}

FASTSPEC_INLINE F32x16 min(const F32x16& a, const F32x16& b) {
  return each_part([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}

FASTSPEC_INLINE NativeF32 keep(NativeI32 mask, NativeF32 value) {
  return bit_cast<NativeF32>(mask & bit_cast<NativeI32>(value));
}

// value where a >= b, else 0
FASTSPEC_INLINE NativeF32 keep_at_least(NativeF32 a, NativeF32 b, NativeF32 value) {
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), value);
#else
  return keep(bit_cast<NativeI32>(a >= b), value);
#endif
}

// sum + value where a > b, else sum
FASTSPEC_INLINE F32x16 add_above(const F32x16& a, float b, const F32x16& sum, const F32x16& value) {
  return each_part([&](int i) {
#if defined(__AVX512F__)
    const __mmask16 above = _mm512_cmp_ps_mask(a.part[i], native(b), _CMP_GT_OQ);
    return bit_cast<NativeF32>(_mm512_mask_add_ps(sum.part[i], above, sum.part[i], value.part[i]));
#else
    return sum.part[i] + keep(bit_cast<NativeI32>(a.part[i] > native(b)), value.part[i]);
#endif
  });
}

// value where a >= b, else otherwise
FASTSPEC_INLINE F32x16 select_at_least(const F32x16& a, float b, const F32x16& value,
                                       float otherwise) {
  return each_part([&](int i) {
    const NativeI32 mask = bit_cast<NativeI32>(a.part[i] >= native(b));
    return bit_cast<NativeF32>((mask & bit_cast<NativeI32>(value.part[i])) |
                               (~mask & bit_cast<NativeI32>(native(otherwise))));
  });
}

#if !defined(__AVX512F__)
FASTSPEC_INLINE uint32_t sign_bits(NativeI32 mask) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(mask)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(bit_cast<__m128>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kNativeLanes; ++i) bits |= (mask[i] < 0 ? 1u : 0u) << i;
  return bits;
#endif
}
#endif

// Bit i is set where lane i >= bound.
FASTSPEC_INLINE uint32_t lanes_at_least(const F32x16& a, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.part[0], native(bound), _CMP_GE_OQ);
#else
  uint32_t bits = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    bits |= sign_bits(bit_cast<NativeI32>(a.part[i] >= native(bound))) << (i * kNativeLanes);
  }
  return bits;
#endif
}

// Bit i is set where low < lane i <= high.
FASTSPEC_INLINE uint32_t lanes_between(const F32x16& a, float low, float high) {
#if defined(__AVX512F__)
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a.part[0], native(low), _CMP_GT_OQ), a.part[0],
                                 native(high), _CMP_LE_OQ);
#else
  uint32_t bits = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const NativeI32 inside = bit_cast<NativeI32>(a.part[i] > native(low)) &
                             bit_cast<NativeI32>(a.part[i] <= native(high));
    bits |= sign_bits(inside) << (i * kNativeLanes);
  }
  return bits;
#endif
}

// Adds 1 to the counts of the lanes > bound.
FASTSPEC_INLINE void count_above(const F32x16& a, float bound, NativeI32* counts) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    counts[i] -= bit_cast<NativeI32>(a.part[i] > native(bound));
  }
}

// sum + left * right where a >= b, else sum
FASTSPEC_INLINE NativeF32 add_at_least(NativeF32 a, NativeF32 b, NativeF32 left, NativeF32 right,
                                       NativeF32 sum) {
#if defined(__AVX512F__)
  return _mm512_mask3_fmadd_ps(left, right, sum, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ));
#else
  return a >= b ? multiply_add(left, right, sum) : sum;
#endif
}

FASTSPEC_INLINE float reduce_max(const F32x16& a) {
  float lane[16];
  store(lane, a);
  float best = lane[0];
  for (int i = 1; i < 16; ++i) best = lane[i] > best ? lane[i] : best;
  return best;
}

FASTSPEC_INLINE float reduce_min(const F32x16& a) {
  float lane[16];
  store(lane, a);
  float best = lane[0];
  for (int i = 1; i < 16; ++i) best = lane[i] < best ? lane[i] : best;
  return best;
}

// Adds the lanes in order, in f64.
FASTSPEC_INLINE double reduce_sum(const F32x16& a) {
  float lane[16];
  store(lane, a);
  double sum = 0;
  for (int i = 0; i < 16; ++i) sum += lane[i];
  return sum;
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
