// Powers of two for the weights of tokens, with the same bits on every instruction set that has a
// fused multiply-add.
#pragma once
#include "simd.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// The bits of 2 ** (j / 16) minus j << 19, which the shifted exponent adds back.
alignas(64) constexpr uint32_t kSixteenths[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// kSixteenths[index % 16] in each lane
FASTSPEC_INLINE NativeU32 sixteenths(NativeU32 index) {
#if defined(__AVX512F__)
  const __m512i table = _mm512_load_si512(kSixteenths);
  return bit_cast<NativeU32>(_mm512_permutexvar_epi32(bit_cast<__m512i>(index), table));
#elif defined(__AVX2__)
  const __m256i* table = reinterpret_cast<const __m256i*>(kSixteenths);
  const __m256i lanes = bit_cast<__m256i>(index);
  const __m256i low = _mm256_permutevar8x32_epi32(_mm256_load_si256(table), lanes);
  const __m256i high = _mm256_permutevar8x32_epi32(_mm256_load_si256(table + 1), lanes);
  const __m256 is_high = bit_cast<__m256>(_mm256_slli_epi32(lanes, 28));
  return bit_cast<NativeU32>(
      _mm256_blendv_ps(bit_cast<__m256>(low), bit_cast<__m256>(high), is_high));
#else
  NativeU32 out;
  for (int i = 0; i < kNativeLanes; ++i) out[i] = kSixteenths[index[i] % 16];
  return out;
#endif
}

// 2 ** y = power * fraction
struct Exp2 {
  NativeF32 power;
  NativeF32 fraction;
};

// For y = x * scale in -125..0 accurate to 5e-7, exactly 1 at 0; undefined elsewhere.
FASTSPEC_INLINE Exp2 exp2_scaled(NativeF32 x, float scale) {
  const NativeF32 round_to_sixteenth = native(0x1.8p19f);
  const NativeF32 shifted = multiply_add(x, native(scale), round_to_sixteenth);
  const NativeF32 rounded = shifted - round_to_sixteenth;
  const NativeF32 r = multiply_add(x, native(scale), -rounded);  // in [-1/32, 1/32]
  // Minimax fit of 2 ** r that is exact at 0.
  NativeF32 fraction = multiply_add(native(0x1.ebfbep-3f), r, native(0x1.62e97ep-1f));
  fraction = multiply_add(fraction, r, native(1.0f));
  const NativeU32 sixteenth = bit_cast<NativeU32>(shifted);
  return {bit_cast<NativeF32>(sixteenths(sixteenth) + (sixteenth << 19)), fraction};
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
