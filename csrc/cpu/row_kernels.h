// The vector kernels on rows of logits, compiled once per instruction set. Their results have the
// same bits on every instruction set with a fused multiply-add.
#pragma once
#include <cstdint>

#include "elements.h"

namespace fastspec::cpu {

constexpr int64_t kLanes = 16;
// A tile yields one maximum per lane, each over kTile / kLanes logits.
constexpr int64_t kTile = 256;  // a lane's tokens of a tile share a group of noise (philox.h)
// The unit of parallel work and of fixed-order sums, the only one that affects a row's result.
constexpr int64_t kChunk = 4096;
constexpr int64_t kMaximaPerChunk = kChunk / kTile * kLanes;

// Number of bounds that sums_above handles at once.
constexpr int kBounds = 8;

inline int64_t num_chunks(int64_t size) { return (size + kChunk - 1) / kChunk; }

// Length of the lane maxima of `size` logits.
inline int64_t num_lane_maxima(int64_t size) { return (size + kTile - 1) / kTile * kLanes; }

// weight(x) = 2 ** ((x - max) * scale) where x >= cutoff, else 0.
struct Weighting {
  float max;
  float scale;
  float cutoff;
};

// What is subtracted from a target: logits of an Element, or weights for kind kKnown. Weights are 0
// from `size` on, where nothing is read; `size` may be negative.
struct Subtrahend {
  const void* data;
  int64_t size;
  Weighting weighting;
};
constexpr int kKnown = static_cast<int>(Element::kFloat16) + 1, kDraftKinds = kKnown + 1;

// Each function takes `size` <= kChunk logits and, where it can skip tiles, their lane maxima.
struct RowKernels {
  // Fills the maxima of each lane by tile, and over all tiles (kLanes values); returns the largest
  // logit, or NaN if there is a NaN.
  float (*max)(const void* logits, int64_t size, float* lane_maxima, float* chunk_lane_maxima);
  double (*sum)(const void* logits, int64_t size, const float* lane_maxima, const Weighting&);
  // out[i] = factor * weight(logits[i])
  void (*weigh)(const void* logits, int64_t size, const Weighting&, float factor, float* out);
  // By the draft's kind: out[i] = max(ratio * weight(logits[i]) - draft's weight i, 0); returns
  // their sum. A null `out` is not filled, else up to a multiple of kLanes.
  double (*excess[kDraftKinds])(const void* logits, int64_t size, const float* lane_maxima,
                                const Weighting&, float ratio, const Subtrahend&, float* out);
  // Adds to sums[i] the weights of the logits above bounds[i]; bounds ascend, none is cut off.
  void (*sums_above)(const void* logits, int64_t size, const float* lane_maxima, const Weighting&,
                     const float* bounds, double* sums);
  // Appends the logits in (low, high] to `out` and returns how many there are.
  int64_t (*gather)(const void* logits, int64_t size, const float* lane_maxima, float low,
                    float high, float* out);
  // Index of the first logit >= bound, or `size`.
  int64_t (*find)(const void* logits, int64_t size, float bound);
  // The lowest logit >= bound, or +inf.
  float (*lowest)(const void* logits, int64_t size, const float* lane_maxima, float bound);
};

// The noise of a row (common/philox.h).
struct NoiseKey {
  uint64_t seed;
  uint64_t position;
};

// Functions on float arrays of any size.
struct ListKernels {
  int64_t (*count_above)(const float* values, int64_t size, float bound);
  // Sum of weights[i] where values[i] > bound.
  double (*mass_above)(const float* values, const float* weights, int64_t size, float bound);
  // Bit i is set if a token of group first + i may have (logit - max) * scale + noise / ln 2 >=
  // `least`; the maxima are those of 32 groups.
  uint32_t (*may_reach)(const float* lane_maxima, const Weighting&, const NoiseKey&, int64_t first,
                        float least);
};

struct SamplingTable {
  RowKernels rows[3];  // by Element
  ListKernels lists;
};

// Returns the kernels of the instruction set in use (kernels.h).
const SamplingTable& sampling_kernels();

}  // namespace fastspec::cpu
