// Vectorised Philox4x32-10 (common/philox.h): the words of neighbouring tokens.
#pragma once
#include <utility>

#include "simd_memory.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

typedef uint64_t NativeU64 __attribute__((vector_size(kNativeLanes * 4)));
constexpr int kWideLanes = kNativeLanes / 2;

// The 64-bit products of the low halves; the high halves are ignored.
FASTSPEC_INLINE NativeU64 multiply_low(NativeU64 a, uint32_t b) {
#if defined(__AVX512F__)
  // Not _mm512_mul_epu32, for which some compilers warn about their own uninitialised operand.
  return bit_cast<NativeU64>(
      _mm512_maskz_mul_epu32(0xff, bit_cast<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return bit_cast<NativeU64>(_mm256_mul_epu32(bit_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#elif defined(__x86_64__)
  return bit_cast<NativeU64>(_mm_mul_epu32(bit_cast<__m128i>(a), _mm_set1_epi64x(b)));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Lanes of a and b in turn, from lane `first` of each on.
template <int first, int... i>
FASTSPEC_INLINE NativeU64 alternate(NativeU64 a, NativeU64 b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (first + i / 2 + i % 2 * kWideLanes)...);
#else
  return __builtin_shuffle(a, b, NativeU64{(first + i / 2 + i % 2 * kWideLanes)...});
#endif
}

// Words 4 * block to 4 * block + 31 of the sequence selected by (key, position, stream).
FASTSPEC_INLINE void philox_words(uint64_t key, uint64_t position, uint32_t stream, uint32_t block,
                                  NativeU32 (&words)[2 * kParts]) {
  constexpr std::make_integer_sequence<int, kWideLanes> lanes;
  NativeU64 lane = {};
  for (int i = 0; i < kWideLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    // A word in the low half of each lane, anything in the high half.
    NativeU64 c0 = position - NativeU64{}, c1 = c0 >> 32, c3 = stream - NativeU64{};
    NativeU64 c2 = lane + (block + part * kWideLanes);
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const NativeU64 even = multiply_low(c0, 0xD2511F53u), odd = multiply_low(c2, 0xCD9E8D57u);
      c0 = (odd >> 32) ^ c1 ^ k0;
      c2 = (even >> 32) ^ c3 ^ k1;
      c1 = odd;
      c3 = even;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    // Little-endian: the low half of a lane comes first.
    const NativeU64 first = (c0 & 0xffffffffu) | c1 << 32, second = (c2 & 0xffffffffu) | c3 << 32;
    words[2 * part] = bit_cast<NativeU32>(alternate<0>(first, second, lanes));
    words[2 * part + 1] = bit_cast<NativeU32>(alternate<kWideLanes / 2>(first, second, lanes));
  }
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
