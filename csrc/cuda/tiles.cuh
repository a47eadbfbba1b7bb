// Rows without filters: the statistics of fixed tiles, each from one read, and what rows make of
// them. Tiles are cut by token, so that no launch, batch or address changes a bit of the sums.
#pragma once
#include "cuda/draw.cuh"

namespace fastspec::cuda {

constexpr int kTileThreads = 64;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kTileBlocks = 4;  // of a multiprocessor; with more, registers spill
#else
constexpr int kTileBlocks = 8;
#endif
constexpr int kTileUnits = kTile / kUnit / kTileThreads;  // of a thread

// One value per warp each, in dynamic shared memory.
struct TileMemory {
  u64 total[kTileThreads / kWarp];
  float max[kTileThreads / kWarp];
  int32_t argmax[kTileThreads / kWarp];
};

// The values of all threads of a block put together; `partials` serve once.
template <class T, class Op>
__device__ __forceinline__ T reduce_tile(const Team& team, T value, T* partials, const Op& op) {
  value = team.warp_reduce(value, op);
  if (team.lane() == 0) partials[team.block_warp()] = value;
  __syncthreads();
  value = partials[0];
  for (int i = 1; i < kTileThreads / kWarp; ++i) value = op(value, partials[i]);
  return value;
}

// By a block of kTileThreads. The logits stay in registers.
template <Element kElement>
__device__ TileStatistics tile_statistics(const Team& team, Row row, int64_t tile,
                                          const Sampling& sampling) {
  TileMemory& memory = *reinterpret_cast<TileMemory*>(dynamic_shared());
  row.element = kElement;  // known to the compiler
  const int64_t first = tile * kTile + static_cast<int64_t>(threadIdx.x) * kUnit;
  constexpr int64_t kStep = kTileThreads * kUnit;
  const bool whole = (tile + 1) * kTile <= row.size && row.bitmask == nullptr;
  Weighting weighting = weighting_of(0.0f, -infinity(), sampling);  // a division, before the loads
  Raw raw[kTileUnits];
  if (whole && is_aligned(row.data)) {
#pragma unroll
    for (int i = 0; i < kTileUnits; ++i) {
      raw[i] = load_unit(address_of(row, first + i * kStep), is_wide(kElement));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTileUnits; ++i) raw[i] = load_tokens(row, first + i * kStep);
  }
  float best = -infinity();
#pragma unroll
  for (int i = 0; i < kTileUnits; ++i) {
    float x[kUnit];
    raw[i].unpack(kElement, x);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) best = max_or_nan(best, x[j]);
  }
  best = reduce_tile(team, best, memory.max, max_or_nan);
  if (!(fabsf(best) < infinity())) return {0, best, INT32_MAX};
  weighting.half_max = best * 0.5f;
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kTileUnits; ++i) {
    float x[kUnit];
    raw[i].unpack(kElement, x);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sum += to_fixed(weighting.unfiltered(x[j]), kWeightOne);
  }
  sum = reduce_tile(team, sum, memory.total, [](u64 a, u64 b) { return a + b; });
  int32_t argmax = INT32_MAX;
  if (sampling.greedy()) {
#pragma unroll
    for (int i = kTileUnits - 1; i >= 0; --i) {
      float x[kUnit];
      raw[i].unpack(kElement, x);
#pragma unroll
      for (int j = kUnit - 1; j >= 0; --j) {
        if (x[j] >= best) argmax = static_cast<int32_t>(first + i * kStep) + j;
      }
    }
    argmax = reduce_tile(team, argmax, memory.argmax,
                         [](int32_t a, int32_t b) { return a < b ? a : b; });
  }
  return {sum, best, argmax};
}

// A tile's weight where that of the row's best logit is 2^44.
__device__ __forceinline__ u64 mass_of(u64 total, float max, const Weighting& row) {
  if (!(max > -infinity())) return 0;
  return static_cast<u64>(static_cast<double>(total) * static_cast<double>(row.unfiltered(max)));
}

// The statistics of the row that the tiles make up, by any one warp.
__device__ inline RowStatistics merge_tiles(const Team& team, const TileStatistics* tiles,
                                            int64_t num, const Sampling& sampling) {
  RowStatistics row = {0, -infinity(), -infinity(), -1, 0};
  for (int64_t i = team.lane(); i < num; i += kWarp) row.max = max_or_nan(row.max, tiles[i].max);
  row.max = team.warp_reduce(row.max, max_or_nan);
  row.valid = fabsf(row.max) < infinity() && sampling.temperature >= 0.0f;
  if (!row.valid) return row;
  const Weighting weighting = weighting_of(row, sampling);
  int32_t first = INT32_MAX;
  for (int64_t i = team.lane(); i < num; i += kWarp) {
    row.total += mass_of(tiles[i].total, tiles[i].max, weighting);
    if (tiles[i].max == row.max && tiles[i].argmax < first) first = tiles[i].argmax;
  }
  row.total = team.warp_reduce(row.total, [](u64 a, u64 b) { return a + b; });
  if (sampling.greedy()) {
    row.threshold = row.max;
    row.argmax = team.warp_reduce(first, [](int32_t a, int32_t b) { return a < b ? a : b; });
  }
  return row;
}

// Draws from a row by its tiles, of which it reads the one that it draws from; -1 if nothing is
// left without the token `removed`.
__device__ inline int64_t draw_from_tiles(Team& team, const Row& row, const TileStatistics* tiles,
                                          int64_t num, const RowStatistics& found,
                                          const Sampling& sampling, float sample, int64_t removed) {
  const Weighting weighting = weighting_of(found, sampling);
  const auto total_of_tile = [&](int64_t i) {
    if (removed < 0 || removed >= row.size || removed / kTile != i) return u64{tiles[i].total};
    const Weighting own = weighting_of(tiles[i].max, -infinity(), sampling);
    return tiles[i].total - own.fixed(logit_at(row, removed));
  };
  const auto mass_of_tile = [&](int64_t i) {
    return i < num ? mass_of(total_of_tile(i), tiles[i].max, weighting) : 0;
  };
  u64 total = 0;
  for (int64_t i = team.lane(); i < num; i += kWarp) total += mass_of_tile(i);
  total = team.warp_reduce(total, [](u64 a, u64 b) { return a + b; });
  if (total == 0) return -1;
  u64 bound = share_rounded_down(sample, total);
  for (int64_t base = 0; base < num; base += kWarp) {
    const u64 mass = mass_of_tile(base + team.lane());
    const u64 inclusive = team.warp_scan(mass);
    const unsigned passed = __ballot_sync(kAllLanes, inclusive > bound);
    if (passed == 0) {
      bound -= __shfl_sync(kAllLanes, inclusive, kWarp - 1);
      continue;
    }
    const int lane = __ffs(passed) - 1;
    const double share =
        static_cast<double>(bound - __shfl_sync(kAllLanes, inclusive - mass, lane)) /
        static_cast<double>(__shfl_sync(kAllLanes, mass, lane));
    const int64_t tile = base + lane, first = tile * kTile;
    const void* data = address_of(row, first);
    const int32_t* bitmask = row.bitmask == nullptr ? nullptr : row.bitmask + first / 32;
    const Row part = {data, bitmask, smaller(kTile, row.size - first), row.element};
    const WithoutToken weights = {weighting_of(tiles[tile].max, -infinity(), sampling),
                                  removed < 0 ? -1 : removed - first};
    const RowView<false> view(team, part);
    const Draw<RowView<false>, WithoutToken> draw(team, view, weights);
    return first + draw.token([&](u64 left) {
      const u64 at = static_cast<u64>(share * static_cast<double>(left));
      return at < left ? at : left - 1;
    });
  }
  return -1;
}

}  // namespace fastspec::cuda
