// Scores of bfloat16 rows by the dot products of AVX512-BF16, where available: twice the products
// per instruction, and no widening.
#include "attention_tiles.inl"
#include "kernels.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

template <bool fetch, class T>
using ScoreRows = decltype(&score_rows<1, fetch, T>);

#if defined(__AVX512F__) && FASTSPEC_COMPILES_BFLOAT16

// 32 values; those whose bit in `mask` is not set are zero.
__attribute__((target("avx512bf16"))) FASTSPEC_INLINE __m512bh load_pairs(const void* from,
                                                                          __mmask32 mask) {
  return bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, from));
}

// Like score_rows, for query rows with bfloat16 values in their first half.
template <int rows, bool fetch>
__attribute__((target("avx512bf16"))) void dot_rows(const float* queries, const BF16* const* keys,
                                                    KeyRange span, int64_t first_dim,
                                                    int64_t stride, float scale, float* scores) {
  constexpr int num_keys = kTileKeys<rows>;
  for (int64_t j = span.first; j < span.last; j += num_keys) {
    if constexpr (fetch) {
      for (int k = 0; k < num_keys; ++k) prefetch(keys[j + kAhead + k] + first_dim, stride);
    }
    NativeF32 sums[kNativeLanes] = {};
    for (int64_t d = 0; d < stride; d += 32) {
      const __mmask32 mask = stride - d < 32 ? 0xffffu : ~__mmask32{0};
      __m512bh key[num_keys];
      for (int k = 0; k < num_keys; ++k) key[k] = load_pairs(keys[j + k] + first_dim + d, mask);
      for (int r = 0; r < rows; ++r) {
        const auto* row = reinterpret_cast<const BF16*>(queries + r * stride);
        const __m512bh query = load_pairs(row + d, mask);
        for (int k = 0; k < num_keys; ++k) {
          NativeF32& sum = sums[r * num_keys + k];
          sum = bit_cast<NativeF32>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), query, key[k]));
        }
      }
    }
    store_scores<rows, num_keys>(sums, scale, scores + j);
  }
}

template <bool fetch>
constexpr ScoreRows<fetch, BF16> kDotRows[kTileRows] = {dot_rows<1, fetch>, dot_rows<2, fetch>,
                                                        dot_rows<3, fetch>, dot_rows<4, fetch>};

#else

template <bool fetch>
constexpr const ScoreRows<fetch, BF16>* kDotRows = kScoreRows<fetch, BF16>;

#endif

// Whether a tile's queries stay bfloat16; copied and padded rows are float32.
template <class T>
bool keeps_bfloat16(int64_t head_size) {
  return std::is_same_v<T, BF16> && head_size == padded(head_size) && multiplies_bfloat16();
}

// Indexed by the number of rows - 1.
template <bool fetch, class T>
const ScoreRows<fetch, T>* score_functions() {
  if constexpr (std::is_same_v<T, BF16>) {
    if (multiplies_bfloat16()) return kDotRows<fetch>;
  }
  return kScoreRows<fetch, T>;
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
