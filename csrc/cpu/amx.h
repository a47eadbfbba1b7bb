// Tiles of AMX-BF16: sizes and registers.
#pragma once
#include "kernels.h"
#include "simd.h"

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
