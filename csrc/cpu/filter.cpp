#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "row.h"

namespace fastspec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowestFinite = std::numeric_limits<float>::lowest();

// Integers in the order of the floats, so that bisection ends after at most 32 steps.
int64_t to_key(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >= 0 ? int64_t{bits} : int64_t{INT32_MIN} - bits;
}

float from_key(int64_t key) {
  const int32_t bits = static_cast<int32_t>(key >= 0 ? key : int64_t{INT32_MIN} - key);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The smallest float t in [low, high] with measure(t) < need; measure(high) < need, and measure
// decreases with t.
template <class Measure>
float smallest_below(float low, float high, double need, const Measure& measure) {
  int64_t first = to_key(low), last = to_key(high);
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (measure(from_key(middle)) < need) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return from_key(last);
}

// Some of a row's logits, in id order.
struct Candidates {
  std::unique_ptr<float[]> values;
  int64_t count;
};

// The logits in (low, high].
Candidates gather(const Row& row, float low, float high) {
  Candidates found{std::unique_ptr<float[]>(new float[row.logits.size]), 0};
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    if (!(row.chunk_maxima[chunk] > low)) continue;
    found.count +=
        row.kernels().gather(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                             row.maxima_of(chunk), low, high, found.values.get() + found.count);
  }
  return found;
}

// A float with at least k logits above it, and not many more if that is cheap; otherwise -inf.
// Each of the few lane maxima represents at least one logit.
float bound_below_top_k(const Row& row, int64_t k) {
  const int64_t coarse = row.chunks() * kLanes;
  const bool is_enough = 2 * k <= coarse;
  const float* maxima = is_enough ? row.chunk_lane_maxima : row.lane_maxima;
  const int64_t count = is_enough ? coarse : num_lane_maxima(row.logits.size);
  int64_t first = to_key(-kInfinity), last = to_key(row.max);
  while (last - first > 1) {
    const int64_t middle = first + (last - first) / 2;
    const int64_t above = sampling_kernels().lists.count_above(maxima, count, from_key(middle));
    (above >= k ? first : last) = middle;
    if (above >= k && above <= 2 * k) break;
  }
  return from_key(first);
}

// The k-th largest logit; `candidates` has at least k logits, or all that are not -inf.
float kth_largest(const Row& row, const Candidates& candidates, float low, int64_t k) {
  const auto count_above = [&](float bound) {
    return sampling_kernels().lists.count_above(candidates.values.get(), candidates.count, bound);
  };
  return smallest_below(low, row.max, static_cast<double>(k), count_above);
}

// Candidates with their weights; those below `cutoff` have weight 0.
class WeightedCandidates {
 public:
  WeightedCandidates(const Row& row, Candidates candidates, float cutoff)
      : candidates_(std::move(candidates)), weights_(new float[candidates_.count]) {
    constexpr int kType = static_cast<int>(Element::kFloat32);
    sampling_kernels().rows[kType].weigh(candidates_.values.get(), candidates_.count,
                                         weighting_of(row, cutoff), 1.0f, weights_.get());
  }

  double mass_above(float bound) const {
    return sampling_kernels().lists.mass_above(candidates_.values.get(), weights_.get(),
                                               candidates_.count, bound);
  }

  // The lowest logit in [low, high] with less than `need` of mass above it.
  float lowest_with_less_above(float low, float high, double need) const {
    return smallest_below(low, high, need, [&](float bound) { return mass_above(bound); });
  }

 private:
  Candidates candidates_;
  std::unique_ptr<float[]> weights_;
};

// The top-p threshold of a row is in (low, high]: the mass above `low` is >= need and that above
// `high`, `beyond`, is < need.
struct Bracket {
  float low;
  float high;
  double beyond;
};

void sums_above(const Row& row, const float* bounds, double* sums) {
  const Weighting weighting = weighting_of(row, -kInfinity);
  std::fill(sums, sums + kBounds, 0.0);
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    row.kernels().sums_above(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                             row.maxima_of(chunk), weighting, bounds, sums);
  }
}

Bracket narrow(Bracket bracket, const float* bounds, const double* sums, double need) {
  for (int i = 0; i < kBounds; ++i) {
    if (sums[i] < need) return {bracket.low, bounds[i], sums[i]};
    bracket.low = bounds[i];
  }
  return bracket;
}

// Bounds that divide (low, high] into equal steps, of value if possible, otherwise of keys.
void subdivide(float low, float high, float* bounds) {
  for (int i = 0; i < kBounds; ++i) {
    const double share = (i + 1.0) / (kBounds + 1);
    if (std::isfinite(low)) {
      bounds[i] = static_cast<float>(low + (double{high} - low) * share);
    } else {
      const int64_t span = to_key(high) - to_key(low);
      bounds[i] = from_key(to_key(low) + static_cast<int64_t>(static_cast<double>(span) * share));
    }
  }
}

// Whether enough logits are above `low` that a narrowing pass costs less than gathering them.
bool is_crowded(const Row& row, float low) {
  const int64_t count = num_lane_maxima(row.logits.size);
  return sampling_kernels().lists.count_above(row.lane_maxima, count, low) > 1000;
}

// Top-p without top-k: up to three passes narrow the threshold down to few logits.
float top_p_of_row(const Row& row) {
  // In units of the temperature below the best logit; the first bound includes every weight.
  constexpr double kDepths[kBounds] = {0, 24, 12, 8, 5, 3, 1.5, 0.5};
  constexpr int kRefinements = 2;
  float bounds[kBounds] = {std::nextafter(weighting_of(row, -kInfinity).cutoff, -kInfinity)};
  for (int i = 1; i < kBounds; ++i) {
    const double bound = row.max - kDepths[i] * row.sampling.temperature;
    bounds[i] = static_cast<float>(std::max<double>(bound, kLowestFinite));
    bounds[i] = std::max(bounds[i], bounds[0]);
  }
  double sums[kBounds];
  sums_above(row, bounds, sums);
  const double need = sums[0] * row.sampling.top_p;
  Bracket bracket = narrow({bounds[0], row.max, 0.0}, bounds, sums, need);
  for (int i = 0; i < kRefinements && is_crowded(row, bracket.low); ++i) {
    subdivide(bracket.low, bracket.high, bounds);
    sums_above(row, bounds, sums);
    bracket = narrow(bracket, bounds, sums, need);
  }
  const WeightedCandidates candidates(row, gather(row, bracket.low, bracket.high), -kInfinity);
  return candidates.lowest_with_less_above(std::nextafter(bracket.low, kInfinity), bracket.high,
                                           need - bracket.beyond);
}

// Top-p among the logits that top-k keeps.
float top_p_of(const Row& row, Candidates candidates, float threshold) {
  const WeightedCandidates weighted(row, std::move(candidates), threshold);
  const double need = weighted.mass_above(-kInfinity) * row.sampling.top_p;
  return weighted.lowest_with_less_above(threshold, row.max, need);
}

// The lowest logit whose weight is at least min_p of the best one's.
float min_p_of_row(const Row& row) {
  const double bound = row.max + row.sampling.temperature * std::log(double{row.sampling.min_p});
  float rounded = static_cast<float>(std::max(bound, double{kLowestFinite}));
  if (rounded < bound) rounded = std::nextafter(rounded, kInfinity);
  float lowest = kInfinity;
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    lowest =
        std::min(lowest, row.kernels().lowest(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                                              row.maxima_of(chunk), rounded));
  }
  return lowest;
}

}  // namespace

float filter_threshold(const Row& row) {
  const Sampling& sampling = row.sampling;
  if (sampling.top_p <= 0 || sampling.min_p >= 1) return row.max;
  float threshold = -kInfinity;
  if (sampling.top_k > 0 && sampling.top_k < row.logits.size) {
    const float low = bound_below_top_k(row, sampling.top_k);
    Candidates candidates = gather(row, low, kInfinity);
    threshold = kth_largest(row, candidates, low, sampling.top_k);
    if (sampling.top_p < 1) threshold = top_p_of(row, std::move(candidates), threshold);
  } else if (sampling.top_p < 1) {
    threshold = top_p_of_row(row);
  }
  return sampling.min_p > 0 ? std::max(threshold, min_p_of_row(row)) : threshold;
}

}  // namespace fastspec::cpu
