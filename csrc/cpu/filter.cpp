#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "row.h"

namespace fastspec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowestFinite = std::numeric_limits<float>::lowest();

// Integers in the order of the floats, so that halving an interval ends after at most 32 steps.
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

// The smallest float t in [low, high] with measure(t) < need, as measure(high) < need and falls
// with t.
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

// Logits of one row above some bound, in id order.
struct Candidates {
  std::unique_ptr<float[]> values;
  int64_t count;
};

Candidates gather_above(const Row& row, float bound) {
  Candidates found{std::unique_ptr<float[]>(new float[row.logits.size]), 0};
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    if (!(row.chunk_maxima[chunk] > bound)) continue;
    found.count +=
        row.kernels().gather_above(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                                   row.maxima_of(chunk), bound, found.values.get() + found.count);
  }
  return found;
}

// A float with at least k logits above it, and few more if that comes cheaply; else -inf.
// Every lane maximum stands for at least one logit, and there are 16 times fewer of them.
float bound_below_top_k(const Row& row, int64_t k) {
  const ListKernels& lists = sampling_kernels().lists;
  const int64_t count = num_lane_maxima(row.logits.size);
  int64_t first = to_key(-kInfinity), last = to_key(row.max);
  while (last - first > 1) {
    const int64_t middle = first + (last - first) / 2;
    const int64_t above = lists.count_above(row.lane_maxima, count, from_key(middle));
    (above >= k ? first : last) = middle;
    if (above >= k && above <= 2 * k) break;
  }
  return from_key(first);
}

// The k-th largest logit; `candidates` hold at least k logits, or all that are not -inf.
float kth_largest(const Row& row, const Candidates& candidates, float low, int64_t k) {
  const auto count_above = [&](float bound) {
    return sampling_kernels().lists.count_above(candidates.values.get(), candidates.count, bound);
  };
  return smallest_below(low, row.max, static_cast<double>(k), count_above);
}

// The lowest logit with less than top_p of the mass above it, where only logits >= low have mass.
// `total` is that mass; a negative total stands for that of the candidates.
float top_p_of(const Row& row, const Candidates& candidates, float low, double total) {
  const SamplingTable& table = sampling_kernels();
  const float* values = candidates.values.get();
  const std::unique_ptr<float[]> weights(new float[candidates.count]);
  table.rows[static_cast<int>(LogitsType::kFloat32)].weigh(
      values, candidates.count, weighting_of(row, low), 1.0f, weights.get());
  const auto mass_above = [&](float bound) {
    return table.lists.mass_above(values, weights.get(), candidates.count, bound);
  };
  if (total < 0) total = mass_above(-kInfinity);
  return smallest_below(low, row.max, total * row.sampling.top_p, mass_above);
}

double mass_at_least(const Row& row, float threshold) {
  const Weighting weighting = weighting_of(row, threshold);
  double mass = 0;
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    mass += row.kernels().sum(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                              row.maxima_of(chunk), weighting);
  }
  return mass;
}

// Top-p without top-k: lowers a bound until enough mass lies above it, then looks only there.
float top_p_of_row(const Row& row) {
  const double total = mass_at_least(row, -kInfinity);
  double depth = 4.0 * row.sampling.temperature;
  float bound = row.max;
  do {
    bound = static_cast<float>(std::max(row.max - depth, double{kLowestFinite}));
    depth *= 2;
  } while (bound > kLowestFinite && mass_at_least(row, bound) < total * row.sampling.top_p);
  const Candidates candidates = gather_above(row, std::nextafter(bound, -kInfinity));
  return top_p_of(row, candidates, bound, total);
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
    const Candidates candidates = gather_above(row, low);
    threshold = kth_largest(row, candidates, low, sampling.top_k);
    if (sampling.top_p < 1) threshold = top_p_of(row, candidates, threshold, -1.0);
  } else if (sampling.top_p < 1) {
    threshold = top_p_of_row(row);
  }
  return sampling.min_p > 0 ? std::max(threshold, min_p_of_row(row)) : threshold;
}

}  // namespace fastspec::cpu
