// Every kernel of row_kernels.h, in namespace FASTSPEC_ISA; included by one source file per
// instruction set.
#include "common/philox.h"
#include "row_kernels.h"
#include "simd_exp2.h"
#include "simd_philox.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// Calls visit(vector, index of its first element) on 16 elements at a time, the rest padded with
// -inf.
template <class T, class F>
FASTSPEC_INLINE void each_vector(const T* x, int64_t size, const F& visit) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) visit(load(x + i), i);
  if (i < size) visit(load_partial(x + i, size - i), i);
}

// Calls visit(vector, way) with way 0 and 1 in turn, so that two chains of sums run in parallel.
template <class T, class F>
FASTSPEC_INLINE void each_vector_two_ways(const T* x, int64_t size, const F& visit) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    visit(load(x + i), 0);
    visit(load(x + i + kLanes), 1);
  }
  for (; i < size; i += kLanes) {
    visit(i + kLanes <= size ? load(x + i) : load_partial(x + i, size - i), 0);
  }
}

FASTSPEC_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Fetches a tile, which may lie past the end of the logits.
template <class T>
FASTSPEC_INLINE void prefetch_tile(const T* x) {
  for (int64_t i = 0; i < kTile; i += 64 / sizeof(T)) __builtin_prefetch(x + i, 0, 2);
}

// Calls visit(tile, its size) on the tiles with a lane maximum >= bound.
template <class T, class F>
FASTSPEC_INLINE void each_tile_at_least(const void* logits, int64_t size, const float* lane_maxima,
                                        float bound, const F& visit) {
  const T* x = static_cast<const T*>(logits);
  for (int64_t i = 0; i < size; i += kTile, lane_maxima += kLanes) {
    if (lanes_at_least(load(lane_maxima), bound) != 0) visit(x + i, smaller(kTile, size - i));
  }
}

FASTSPEC_INLINE F32x16 weight(const F32x16& x, const Weighting& weighting) {
  return each_part([&](int i) {
    const Exp2 exp2 = exp2_scaled(x.part[i] - native(weighting.max), weighting.scale);
    return keep_at_least(x.part[i], native(weighting.cutoff), exp2.power * exp2.fraction);
  });
}

template <class T>
bool has_nan(const T* x, int64_t size) {
  uint32_t ordered = 0xffff;
  each_vector(x, size, [&](const F32x16& v, int64_t) { ordered &= lanes_at_least(v, -kInfinity); });
  return ordered != 0xffff;
}

template <class T>
float row_max(const void* logits, int64_t size, float* lane_maxima, float* chunk_lane_maxima) {
  const T* x = static_cast<const T*>(logits);
  F32x16 best = broadcast(-kInfinity);
  // A NaN makes the sum NaN; so may infinities, so a NaN sum only triggers a closer check.
  F32x16 suspect[2] = {broadcast(0.0f), broadcast(0.0f)};
  for (int64_t i = 0; i < size; i += kTile, lane_maxima += kLanes) {
    F32x16 tile_best[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
    each_vector_two_ways(x + i, smaller(kTile, size - i),
                         [&](const F32x16& v, int way) FASTSPEC_INLINE_LAMBDA {
                           tile_best[way] = max(v, tile_best[way]);
                           suspect[way] = suspect[way] + v;
                         });
    tile_best[0] = max(tile_best[0], tile_best[1]);
    store(lane_maxima, tile_best[0]);
    best = max(tile_best[0], best);
  }
  store(chunk_lane_maxima, best);
  const bool is_suspect = lanes_at_least(suspect[0] + suspect[1], -kInfinity) != 0xffff;
  if (is_suspect && has_nan(x, size)) return std::numeric_limits<float>::quiet_NaN();
  return reduce_max(best);
}

// Powers take so long that the next chunk of the row arrives meanwhile.
template <class T>
double row_sum(const void* logits, int64_t size, const float* lane_maxima,
               const Weighting& weighting) {
  const NativeF32 max = native(weighting.max), cutoff = native(weighting.cutoff);
  const float scale = weighting.scale;
  F32x16 sum = broadcast(0.0f);
  each_tile_at_least<T>(
      logits, size, lane_maxima, weighting.cutoff, [&](const T* tile, int64_t count) {
        F32x16 sums[2] = {broadcast(0.0f), broadcast(0.0f)};
        prefetch_tile(tile + kChunk);
        each_vector_two_ways(tile, count, [&](const F32x16& v, int way) FASTSPEC_INLINE_LAMBDA {
          sums[way] = each_part([&](int p) {
            const Exp2 exp2 = exp2_scaled(v.part[p] - max, scale);
            return add_at_least(v.part[p], cutoff, exp2.power, exp2.fraction, sums[way].part[p]);
          });
        });
        sum = sum + (sums[0] + sums[1]);
      });
  return reduce_sum(sum);
}

template <class T>
void row_weigh(const void* logits, int64_t size, const Weighting& weighting, float factor,
               float* out) {
  const F32x16 scale = broadcast(factor);
  each_vector(static_cast<const T*>(logits), size, [&](const F32x16& v, int64_t i) {
    const F32x16 weights = weight(v, weighting) * scale;
    if (i + kLanes <= size) {
      store(out + i, weights);
    } else {
      std::memcpy(out + i, &weights, (size - i) * sizeof(float));
    }
  });
}

// A weight that is already known.
struct Known {
  float weight;
};

template <class T>
FASTSPEC_INLINE F32x16 draft_weight(const T* x, int64_t size, const Weighting& weighting) {
  return weight(size < kLanes ? load_partial(x, size) : load(x), weighting);
}

FASTSPEC_INLINE F32x16 draft_weight(const Known* x, int64_t size, const Weighting&) {
  const float* weights = &x->weight;
  return size < kLanes ? max(load_partial(weights, size), broadcast(0.0f)) : load(weights);
}

template <class T, class D>
double row_excess(const void* logits, int64_t size, const float* lane_maxima,
                  const Weighting& weighting, float ratio, const Subtrahend& draft, float* out) {
  const T* x = static_cast<const T*>(logits);
  const D* taken = static_cast<const D*>(draft.data);
  const F32x16 zero = broadcast(0.0f);
  const Weighting ours = weighting, theirs = draft.weighting;
  const auto left = [&](const F32x16& v, const F32x16& less) FASTSPEC_INLINE_LAMBDA {
    const F32x16 w = weight(v, ours);
    return max(
        each_part([&](int p) { return multiply_add(w.part[p], native(ratio), -less.part[p]); }),
        zero);
  };
  F32x16 sum = zero;
  for (int64_t begin = 0; begin < size; begin += kTile, lane_maxima += kLanes) {
    const int64_t end = smaller(begin + kTile, size);
    if (lanes_at_least(load(lane_maxima), ours.cutoff) == 0) {
      for (int64_t i = begin; out != nullptr && i < end; i += kLanes) store(out + i, zero);
      continue;
    }
    F32x16 sums[2] = {zero, zero};
    int64_t i = begin;
    const int64_t whole = smaller(end, draft.size);
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
#pragma GCC unroll 2
      for (int way = 0; way < 2; ++way) {
        const int64_t at = i + way * kLanes;
        const F32x16 rest = left(load(x + at), draft_weight(taken + at, kLanes, theirs));
        if (out != nullptr) store(out + at, rest);
        sums[way] = sums[way] + rest;
      }
    }
    for (; i < end; i += kLanes) {
      const F32x16 v = i + kLanes <= size ? load(x + i) : load_partial(x + i, size - i);
      const int64_t drafted = draft.size - i;
      const F32x16 rest = left(v, drafted > 0 ? draft_weight(taken + i, drafted, theirs) : zero);
      if (out != nullptr) store(out + i, rest);
      sums[0] = sums[0] + rest;
    }
    sum = sum + (sums[0] + sums[1]);
  }
  return reduce_sum(sum);
}

template <class T>
void row_sums_above(const void* logits, int64_t size, const float* lane_maxima,
                    const Weighting& weighting, const float* bounds, double* sums) {
  F32x16 total[kBounds];
  for (F32x16& sum : total) sum = broadcast(0.0f);
  each_tile_at_least<T>(logits, size, lane_maxima, bounds[0], [&](const T* tile, int64_t count) {
    F32x16 tile_sum[kBounds];
#pragma GCC unroll 8
    for (int i = 0; i < kBounds; ++i) tile_sum[i] = broadcast(0.0f);
    each_vector(tile, count, [&](const F32x16& v, int64_t) {
      const F32x16 w = weight(v, weighting);
#pragma GCC unroll 8
      for (int i = 0; i < kBounds; ++i) tile_sum[i] = add_above(v, bounds[i], tile_sum[i], w);
    });
#pragma GCC unroll 8
    for (int i = 0; i < kBounds; ++i) total[i] = total[i] + tile_sum[i];
  });
  for (int i = 0; i < kBounds; ++i) sums[i] += reduce_sum(total[i]);
}

template <class T>
int64_t row_gather(const void* logits, int64_t size, const float* lane_maxima, float low,
                   float high, float* out) {
  int64_t found = 0;
  each_tile_at_least<T>(logits, size, lane_maxima, low, [&](const T* tile, int64_t count) {
    each_vector(tile, count, [&](const F32x16& v, int64_t) {
      uint32_t bits = lanes_between(v, low, high);
      if (bits == 0) return;
      float lane[16];
      store(lane, v);
      for (; bits != 0; bits &= bits - 1) out[found++] = lane[__builtin_ctz(bits)];
    });
  });
  return found;
}

template <class T>
int64_t row_find(const void* logits, int64_t size, float bound) {
  const T* x = static_cast<const T*>(logits);
  for (int64_t i = 0; i < size; i += kLanes) {
    const bool whole = i + kLanes <= size;
    const F32x16 v = whole ? load(x + i) : load_partial(x + i, size - i);
    const uint32_t bits = lanes_at_least(v, bound);
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  return size;
}

template <class T>
float row_lowest(const void* logits, int64_t size, const float* lane_maxima, float bound) {
  F32x16 lowest = broadcast(kInfinity);
  each_tile_at_least<T>(logits, size, lane_maxima, bound, [&](const T* tile, int64_t count) {
    each_vector(tile, count, [&](const F32x16& v, int64_t) {
      lowest = min(lowest, select_at_least(v, bound, v, kInfinity));
    });
  });
  return reduce_min(lowest);
}

int64_t list_count_above(const float* values, int64_t size, float bound) {
  NativeI32 counts[kParts] = {};
  each_vector(values, size, [&](const F32x16& v, int64_t) { count_above(v, bound, counts); });
  int64_t count = 0;
  for (const NativeI32& part : counts) {
    for (int lane = 0; lane < kNativeLanes; ++lane) count += part[lane];
  }
  return count;
}

double list_mass_above(const float* values, const float* weights, int64_t size, float bound) {
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kTile) {
    F32x16 sum = broadcast(0.0f);
    each_vector(values + begin, smaller(kTile, size - begin), [&](const F32x16& v, int64_t i) {
      const float* w = weights + begin + i;
      const bool whole = begin + i + kLanes <= size;
      sum = add_above(v, bound, sum, whole ? load(w) : load_partial(w, size - begin - i));
    });
    total += reduce_sum(sum);
  }
  return total;
}

// The noise of a group is at most -ln(-ln(1 - d) / 16) < -ln(d / 16), where 1 - d = (word / 16 +
// 0.5) / 2^28; the bits of a float as an integer are at most its binary logarithm.
uint32_t list_may_reach(const float* lane_maxima, const Weighting& weighting, const NoiseKey& key,
                        int64_t first, float least) {
  const F32x16 best[2] = {load(lane_maxima), load(lane_maxima + kLanes)};
  const float cutoff = weighting.cutoff;
  if ((lanes_at_least(best[0], cutoff) | lanes_at_least(best[1], cutoff)) == 0) return 0;
  NativeU32 words[2 * kParts];
  philox_words(key.seed, key.position, kLeastStream, static_cast<uint32_t>(first / 4), words);
  uint32_t may_reach = 0;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const F32x16 bound = each_part([&](int i) {
      const NativeU32 complement = ~words[half * kParts + i] >> 4;
      const NativeF32 d =
          __builtin_convertvector(bit_cast<NativeI32>(complement), NativeF32) + 0.5f;
      const NativeF32 bits = __builtin_convertvector(bit_cast<NativeI32>(d), NativeF32);
      const NativeF32 noise = multiply_add(bits, native(-0x1p-23f), native(127.0f + 32.0f));
      const NativeF32 below = best[half].part[i] - native(weighting.max);
      const NativeF32 score = multiply_add(below, native(weighting.scale), noise);
      return best[half].part[i] >= native(cutoff) ? score : native(-kInfinity);
    });
    may_reach |= lanes_at_least(bound, least) << (half * kLanes);
  }
  return may_reach;
}

template <class T>
constexpr RowKernels row_kernels() {
  return {row_max<T>,
          row_sum<T>,
          row_weigh<T>,
          {row_excess<T, float>, row_excess<T, BF16>, row_excess<T, F16>, row_excess<T, Known>},
          row_sums_above<T>,
          row_gather<T>,
          row_find<T>,
          row_lowest<T>};
}

}  // namespace

extern const SamplingTable kSamplingTable;
const SamplingTable kSamplingTable = {
    {row_kernels<float>(), row_kernels<BF16>(), row_kernels<F16>()},
    {list_count_above, list_mass_above, list_may_reach}};

}  // namespace fastspec::cpu::FASTSPEC_ISA
