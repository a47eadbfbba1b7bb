// The statistics of one row: its best logit, the filters' threshold, the sum of the kept weights.
#pragma once
#include "cuda/filter.cuh"

namespace fastspec::cuda {

// The results of passes over a row: all that its probabilities need.
struct RowStatistics {
  u64 total;  // of the kept weights; that of the best logit is 2^44
  float max;
  float threshold;  // the lowest kept logit, -inf without a filter
  int32_t argmax;   // of greedy rows only: the lowest id of the best logit
  bool valid;
};

// The parameters of one row.
struct Sampling {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;

  __device__ bool greedy() const { return temperature == 0.0f; }
  // The temperature of log-probabilities.
  __device__ float scale() const { return greedy() ? 1.0f : temperature; }
};

__device__ __forceinline__ Sampling sampling_at(const SamplingParameters& all, int64_t index) {
  return {all.temperature == nullptr ? 1.0f : __ldg(all.temperature + index),
          all.top_k == nullptr ? 0 : __ldg(all.top_k + index),
          all.top_p == nullptr ? 1.0f : __ldg(all.top_p + index),
          all.min_p == nullptr ? 0.0f : __ldg(all.min_p + index)};
}

// Turns a logit into a weight, which depends on nothing else. Half the distance to the best logit
// cannot overflow; the scale is kept finite and positive, because 0 * inf is NaN.
struct Weighting {
  float half_max;
  float scale;
  float threshold;

  __device__ __forceinline__ float weight(float x) const {
    return x >= threshold ? exp2_approx(__fmul_rn(fmaf(x, 0.5f, -half_max), scale)) : 0.0f;
  }
  __device__ __forceinline__ u64 fixed(float x) const { return to_fixed(weight(x), kWeightOne); }
};

__device__ __forceinline__ Weighting weighting_of(const RowStatistics& row,
                                                  const Sampling& sampling) {
  constexpr double kTwiceLog2E = 2.8853900817779268;
  const float scale = static_cast<float>(kTwiceLog2E / static_cast<double>(sampling.scale()));
  return {row.max * 0.5f, fminf(fmaxf(scale, 0x1p-149f), FLT_MAX), row.threshold};
}

__device__ __forceinline__ float logprob(const RowStatistics& row, const Sampling& sampling,
                                         float x) {
  const float sum = static_cast<float>(row.total) * (1.0f / kWeightOne);
  const float half = x * 0.5f - row.max * 0.5f;  // of the distance, see Weighting
  return half / sampling.scale() * 2.0f - logf(sum);
}

// The filtered probability of a logit, not truncated to fixed point.
__device__ __forceinline__ double probability(const RowStatistics& row, const Sampling& sampling,
                                              float x) {
  const double weight = weighting_of(row, sampling).weight(x);
  return weight * kWeightOne / static_cast<double>(row.total);
}

template <class View>
__device__ u64 sum_weights(Team& team, const View& view, const Weighting& weighting) {
  u64 sum = 0;
  view.pass([&](const float (&x)[kUnit], int64_t) {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sum += weighting.fixed(x[j]);
  });
  return team.all_reduce(sum, u64{0}, [](u64 a, u64 b) { return a + b; });
}

template <class View>
__device__ int32_t first_at_least(Team& team, const View& view, float bound) {
  int32_t first = INT32_MAX;
  view.pass([&](const float (&x)[kUnit], int64_t token) {
#pragma unroll
    for (int j = kUnit - 1; j >= 0; --j) {
      const int32_t id = static_cast<int32_t>(token) + j;
      if (x[j] >= bound && id < first) first = id;
    }
  });
  return team.all_reduce(first, INT32_MAX, [](int32_t a, int32_t b) { return a < b ? a : b; });
}

// Top-p and min-p, among the logits above the threshold.
template <class View>
__device__ void keep_likely(Team& team, const View& view, const Sampling& sampling,
                            RowStatistics* row) {
  Weighting weighting = weighting_of(*row, sampling);
  if (sampling.top_p < 1.0f) {
    const u64 need = share_rounded_up(sampling.top_p, row->total);
    const Threshold found =
        search<u64>(team, view, need, [&](float x) { return weighting.fixed(x); });
    weighting.threshold = row->threshold = found.value;
    row->total = found.kept;
  }
  if (sampling.min_p > 0.0f) {
    float lowest = infinity();
    u64 sum = 0;
    view.pass([&](const float (&x)[kUnit], int64_t) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        const float weight = weighting.weight(x[j]);
        if (weight >= sampling.min_p) {
          lowest = fminf(lowest, x[j]);
          sum += to_fixed(weight, kWeightOne);
        }
      }
    });
    row->total = team.all_reduce(sum, u64{0}, [](u64 a, u64 b) { return a + b; });
    row->threshold =
        team.all_reduce(lowest, infinity(), [](float a, float b) { return fminf(a, b); });
  }
}

// Reads the whole row. The result is the same for any team.
template <class View>
__device__ RowStatistics row_statistics(Team& team, const View& view, const Sampling& sampling) {
  float best = -infinity();
  view.first_pass([&](const float (&x)[kUnit], int64_t) {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) best = max_or_nan(best, x[j]);
  });
  best = team.all_reduce(best, -infinity(), max_or_nan);
  RowStatistics row = {0, best, -infinity(), -1, false};
  row.valid = fabsf(best) < infinity() && sampling.temperature >= 0.0f;
  if (!row.valid) return row;

  const bool only_best = sampling.top_p <= 0.0f || sampling.min_p >= 1.0f;
  const bool filtered = !only_best && !sampling.greedy();
  if (filtered && sampling.top_k > 0 && sampling.top_k < view.row().size) {
    row.threshold = search<uint32_t>(team, view, sampling.top_k, [](float x) {
                      return x > -infinity() ? 1u : 0u;
                    }).value;
  }
  if (only_best && !sampling.greedy()) row.threshold = best;
  row.total = sum_weights(team, view, weighting_of(row, sampling));
  if (filtered) keep_likely(team, view, sampling, &row);
  if (sampling.greedy()) {
    row.threshold = best;
    row.argmax = first_at_least(team, view, best);
  }
  return row;
}

}  // namespace fastspec::cuda
