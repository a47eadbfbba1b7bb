// Vector arithmetic at the native width of one instruction set, for kernels whose bits may differ
// between instruction sets.
#pragma once
#include <type_traits>
#include <utility>

#include "elements.h"
#include "simd.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;

FASTSPEC_INLINE NativeF32 load_native(const float* from) {
  NativeF32 x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class T>
FASTSPEC_INLINE NativeF32 load_native(const T* from) {
  return widen(from);
}

// The first `count` elements, then zeros.
template <class T>
FASTSPEC_INLINE NativeF32 load_rest(const T* from, int64_t count) {
  T rest[kNativeLanes] = {};
  std::memcpy(rest, from, count * sizeof(T));
  return load_native(rest);
}

template <class T>
FASTSPEC_INLINE float load_one(const T* from) {
  return load_rest(from, 1)[0];
}

// Calls f with a null pointer of the elements' type.
template <class F>
auto with_type(Element element, const F& f) {
  switch (element) {
    case Element::kBFloat16:
      return f(static_cast<const BF16*>(nullptr));
    case Element::kFloat16:
      return f(static_cast<const F16*>(nullptr));
    default:
      return f(static_cast<const float*>(nullptr));
  }
}

// Converts a row to float32 and pads it with zeros to padded(size).
template <class T>
void widen_row(const T* from, int64_t size, float* to) {
  int64_t d = 0;
  for (; d + kRowPadding <= size; d += kRowPadding) store(to + d, load(from + d));
  if (d < size) {
    T rest[kRowPadding] = {};
    std::memcpy(rest, from + d, (size - d) * sizeof(T));
    store(to + d, load(rest));
  }
}

FASTSPEC_INLINE void convert(float x, float* to) { *to = x; }

// Rounds to nearest even.
FASTSPEC_INLINE void convert(float x, BF16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40u);
}

// Rounds to nearest even; adding 0.5 rounds values that become subnormal to multiples of 2^-24.
FASTSPEC_INLINE void convert(float x, F16* to) {
  const uint32_t sign = (bit_cast<uint32_t>(x) >> 16) & 0x8000u;
  const uint32_t bits = bit_cast<uint32_t>(x) & 0x7fffffffu;
  uint32_t half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  if (bits < 0x38800000u) half = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
  if (bits >= 0x477ff000u) half = 0x7c00u;
  if (bits > 0x7f800000u) half = 0x7e00u;
  to->bits = static_cast<uint16_t>(half | sign);
}

FASTSPEC_INLINE void store_native(float* to, NativeF32 x) { std::memcpy(to, &x, sizeof(x)); }

FASTSPEC_INLINE void store_native(BF16* to, NativeF32 x) {
  const NativeU32 bits = bit_cast<NativeU32>(x);
  const NativeU32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const NativeU32 is_number = bit_cast<NativeU32>(x == x);
  const NativeU16 narrow = __builtin_convertvector(
      (rounded & is_number) | (((bits >> 16) | 0x40u) & ~is_number), NativeU16);
  std::memcpy(to, &narrow, sizeof(narrow));
}

FASTSPEC_INLINE void store_native(F16* to, NativeF32 x) {
  for (int i = 0; i < kNativeLanes; ++i) convert(x[i], to + i);
}

template <class From, class To>
void convert_row(const From* from, int64_t size, To* to) {
  int64_t i = 0;
  for (; i + kNativeLanes <= size; i += kNativeLanes) store_native(to + i, load_native(from + i));
  for (; i < size; ++i) convert(load_one(from + i), to + i);
}

// Lane i of the result is lane from[i] of a, or of b if from[i] is too large.
template <int... from>
FASTSPEC_INLINE NativeF32 pick(NativeF32 a, NativeF32 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, from...);
#else
  return __builtin_shuffle(a, b, NativeI32{from...});
#endif
}

// Lane i of the result is lane i of a if i does not have `bit`, otherwise lane i of b.
template <int bit, int... i>
FASTSPEC_INLINE NativeF32 blend(NativeF32 a, NativeF32 b, std::integer_sequence<int, i...>) {
  return pick<((i & bit) ? i + kNativeLanes : i)...>(a, b);
}

// The lanes that `blend` drops, each at the place of its partner i ^ bit.
template <int bit, int... i>
FASTSPEC_INLINE NativeF32 cross(NativeF32 a, NativeF32 b, std::integer_sequence<int, i...>) {
  return pick<((i & bit) ? (i ^ bit) + kNativeLanes : (i ^ bit))...>(a, b);
}

// Adds lanes of `count` vectors whose indices differ in `bit`, then in the lower bits, until one
// vector remains; those bits of a lane's index select its vector, the highest bit first.
template <int count, int bit>
FASTSPEC_INLINE NativeF32 fold(NativeF32* sums) {
  if constexpr (count == 1) {
    return sums[0];
  } else {
    constexpr int half = count / 2;
    constexpr std::make_integer_sequence<int, kNativeLanes> lanes;
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      sums[i] =
          blend<bit>(sums[i], sums[i + half], lanes) + cross<bit>(sums[i], sums[i + half], lanes);
    }
    return fold<half, bit / 2>(sums);
  }
}

// Lane i becomes the sum over the lanes of sums[i], in the same order for every i.
FASTSPEC_INLINE NativeF32 sum_each(NativeF32 (&sums)[kNativeLanes]) {
  return fold<kNativeLanes, kNativeLanes / 2>(sums);
}

// The first part of sum_each, of `count` vectors.
template <int count>
FASTSPEC_INLINE NativeF32 sum_some(NativeF32* sums) {
  return fold<count, kNativeLanes / 2>(sums);
}

template <int count, int... i>
FASTSPEC_INLINE NativeF32 in_order(NativeF32 x, std::integer_sequence<int, i...>) {
  return pick<(i % count * (kNativeLanes / count) + i / count)...>(x, x);
}

// The second part: vector i of parts is the result of sum_some on sums[i * count] and those after.
template <int count>
FASTSPEC_INLINE NativeF32 sum_parts(NativeF32* parts) {
  const NativeF32 sums = fold<kNativeLanes / count, kNativeLanes / count / 2>(parts);
  return in_order<count>(sums, std::make_integer_sequence<int, kNativeLanes>());
}

// Swaps each lane with `bit` of a for the lane without it of b.
template <int bit, int... i>
FASTSPEC_INLINE void exchange(NativeF32& a, NativeF32& b, std::integer_sequence<int, i...>) {
  const NativeF32 before = a;
  a = pick<((i & bit) ? (i ^ bit) + kNativeLanes : i)...>(before, b);
  b = pick<((i & bit) ? i + kNativeLanes : (i ^ bit))...>(before, b);
}

// Lane i of row j becomes lane j of row i.
template <int bit = kNativeLanes / 2>
FASTSPEC_INLINE void transpose(NativeF32 (&rows)[kNativeLanes]) {
  constexpr std::make_integer_sequence<int, kNativeLanes> lanes;
#pragma GCC unroll 16
  for (int i = 0; i < kNativeLanes; ++i) {
    if ((i & bit) == 0) exchange<bit>(rows[i], rows[i + bit], lanes);
  }
  if constexpr (bit > 1) transpose<bit / 2>(rows);
}

template <int bit, int... i>
FASTSPEC_INLINE NativeF32 swap(NativeF32 x, std::integer_sequence<int, i...>) {
  return pick<(i ^ bit)...>(x, x);
}

template <int bit = kNativeLanes / 2>
FASTSPEC_INLINE float largest(NativeF32 x) {
  if constexpr (bit == 0) {
    return x[0];
  } else {
    const NativeF32 swapped = swap<bit>(x, std::make_integer_sequence<int, kNativeLanes>());
    return largest<bit / 2>(x < swapped ? swapped : x);
  }
}

template <int bit = kNativeLanes / 2>
FASTSPEC_INLINE float total(NativeF32 x) {
  if constexpr (bit == 0) {
    return x[0];
  } else {
    return total<bit / 2>(x + swap<bit>(x, std::make_integer_sequence<int, kNativeLanes>()));
  }
}

// 2^x within 1 ulp for x <= 127, exactly 1 at 0, 0 below the normal numbers, NaN for NaN.
FASTSPEC_INLINE NativeF32 exp2(NativeF32 x) {
#if defined(__AVX512F__)
  const NativeF32 bounded = x;
#else
  const NativeF32 bounded = x < -126.0f ? native(-126.0f) : x;
#endif
  const NativeF32 shifted = bounded + 0x1.8p23f;  // its low bits are the integer part
  const NativeF32 whole = shifted - 0x1.8p23f, fraction = bounded - whole;
  NativeF32 y = native(1.5461447e-4f);
  y = multiply_add(y, fraction, native(1.3390867e-3f));
  y = multiply_add(y, fraction, native(9.618057e-3f));
  y = multiply_add(y, fraction, native(5.550357e-2f));
  y = multiply_add(y, fraction, native(2.4022651e-1f));
  y = multiply_add(y, fraction, native(6.9314718e-1f));
  y = multiply_add(y, fraction, native(1.0f));
#if defined(__AVX512F__)
  const __mmask16 kept = _mm512_cmp_ps_mask(x, native(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, y, whole);
#else
  const NativeF32 scale = bit_cast<NativeF32>((bit_cast<NativeU32>(shifted) << 23) + 0x3f800000u);
  return x < -126.0f ? NativeF32{} : y * scale;
#endif
}

FASTSPEC_INLINE float exp2(float x) { return exp2(native(x))[0]; }

// A polynomial near 0 keeps small arguments accurate, where 1 - 2 / (e^2x + 1) would cancel.
FASTSPEC_INLINE NativeF32 tanh(NativeF32 x) {
  const NativeF32 magnitude = x < 0.0f ? -x : x;
  const NativeF32 square = x * x;
  NativeF32 y = native(-6.0018082e-3f);
  y = multiply_add(y, square, native(2.093143e-2f));
  y = multiply_add(y, square, native(-5.383702e-2f));
  y = multiply_add(y, square, native(1.3332678e-1f));
  y = multiply_add(y, square, native(-3.3333328e-1f));
  const NativeF32 small = multiply_add(y * square, x, x);
  const NativeF32 bounded = magnitude > 20.0f ? native(20.0f) : magnitude;
  const NativeF32 large = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2E)) + 1.0f);
  return magnitude < 0.64f ? small : (x < 0.0f ? -large : large);
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
