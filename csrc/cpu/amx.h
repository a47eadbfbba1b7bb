// Tiles of AMX-BF16: sizes and registers.
#pragma once
#include "kernels.h"
#include "lanes.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

constexpr int64_t kPairDepth = 32;  // values of a row in one vector, or in one row of a tile
constexpr int64_t kTileRowsOfAmx = 16;

struct PairTile {
  BF16 pairs[kPairDepth / 2][kTileRowsOfAmx][2];
};

inline int64_t pair_tiles(int64_t depth) { return (depth + kPairDepth - 1) / kPairDepth; }
inline int64_t row_blocks(int64_t rows) { return (rows + kTileRowsOfAmx - 1) / kTileRowsOfAmx; }

#if defined(__AVX512F__) && FASTSPEC_COMPILES_AMX

#define FASTSPEC_AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

// Call before loading tiles, because GCC's tile loads do not declare what they read.
FASTSPEC_INLINE void finish_stores(const void* to) { __asm__ volatile("" : : "r"(to) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Indices of 32 halves that alternate between both halves of a vector.
FASTSPEC_INLINE __m512i interleaved_halves() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                          6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

// Sums of a tile are lines with a lane for each of 16 rows. Fewer rows fill a vector with the same
// rows of several lines: `parts` of them, with 16 / parts rows each.
template <int parts>
FASTSPEC_INLINE NativeF32 beside(const float (*lines)[kTileRowsOfAmx], int64_t step) {
  if constexpr (parts == 1) return _mm512_loadu_ps(lines[0]);
  if constexpr (parts == 2) {
    const __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(lines[0]));
    return _mm512_insertf32x8(first, _mm256_loadu_ps(lines[step]), 1);
  }
  const auto two = [&](const float (*from)[kTileRowsOfAmx]) FASTSPEC_INLINE_LAMBDA {
    const __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(from[0]));
    return _mm256_insertf128_ps(first, _mm_loadu_ps(from[step]), 1);
  };
  return _mm512_insertf32x8(_mm512_castps256_ps512(two(lines)), two(lines + 2 * step), 1);
}

// Calls f with an integral_constant: the parts of a vector for this many rows.
template <class F>
FASTSPEC_INLINE void with_parts(int64_t num_rows, const F& f) {
  if (num_rows <= kTileRowsOfAmx / 4) return f(std::integral_constant<int, 4>());
  if (num_rows <= kTileRowsOfAmx / 2) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 1>());
}

// Eight tiles of 16 rows of 64 bytes.
FASTSPEC_AMX inline void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  finish_stores(&config);
  _tile_loadconfig(&config);
}

#endif

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
