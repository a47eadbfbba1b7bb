#include "row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/half.h"
#include "common/philox.h"
#include "parallel.h"

namespace fastspec::cpu {

// Less work than this, about 10 us, is not worth waking a thread, which may be slow.
static constexpr int64_t kLogitsPerThread = 1 << 17;
static constexpr int64_t kWeighingsPerThread = 1 << 16;
static constexpr int64_t kScratchPerChunk = kMaximaPerChunk + kLanes + 1;
static constexpr double kLog2E = 1.4426950408889634;

int64_t Row::chunk_size(int64_t chunk) const {
  return std::min(kChunk, logits.size - chunk * kChunk);
}

bool Row::is_filtered() const {
  const bool top_k_on = sampling.top_k > 0 && sampling.top_k < logits.size;
  return !sampling.greedy() && (top_k_on || sampling.top_p < 1 || sampling.min_p > 0);
}

int64_t Row::argmax() const {
  int64_t chunk = 0;
  while (chunk_maxima[chunk] < max) ++chunk;
  const int64_t begin = chunk * kChunk;
  return begin + kernels().find(logits.at(begin), chunk_size(chunk), max);
}

float Row::logit(int64_t token) const {
  const void* at = logits.at(token);
  if (logits.type == Element::kFloat32) return *static_cast<const float*>(at);
  const uint16_t bits = *static_cast<const uint16_t*>(at);
  return logits.type == Element::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

double Row::log_prob(int64_t token) const {
  const double temperature = sampling.greedy() ? 1.0 : sampling.temperature;
  return (double{logit(token)} - max) / temperature - std::log(sum);
}

double Row::prob(int64_t token) const {
  if (token < 0 || token >= logits.size) return 0.0;
  const float x = logit(token);
  if (!(x >= threshold) || std::isinf(x)) return 0.0;
  return std::exp(log_prob(token));
}

double Row::logsumexp() const {
  const double temperature = sampling.greedy() ? 1.0 : sampling.temperature;
  return max / temperature + std::log(sum);
}

// The weights relative to `max`, which may be the maximum of only part of a row.
static Weighting weighting_below(float max, const Sampling& sampling, float threshold) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  const bool greedy = sampling.greedy();
  const double temperature = greedy ? 1.0 : sampling.temperature;
  const float scale = static_cast<float>(std::min(kLog2E / temperature, kLargest));
  // Weights under 2 ** -125 are zero; so are those of -inf, which the lowest finite number
  // excludes.
  double negligible = std::max(max - 125.0 / scale, -kLargest);
  if (scale > 0) negligible = std::max(negligible, max - kLargest);  // x - max stays finite
  const double cutoff = greedy ? negligible : std::max(negligible, double{threshold});
  float rounded = static_cast<float>(cutoff);
  // Rounded up: if the temperature is below the spacing of floats near the best logit, a lower one
  // would admit a logit outside the range of exp2_scaled.
  if (rounded < cutoff) rounded = std::nextafter(rounded, max);
  // At an infinite temperature every weight is 1, and subtracting 0 cannot overflow.
  return {scale > 0 ? max : 0.0f, scale, rounded};
}

Weighting weighting_of(const Row& row, float threshold) {
  return weighting_below(row.max, row.sampling, threshold);
}

int64_t draw_chunk(const double* chunk_sums, int64_t chunks, double bound, double* before) {
  double cumulative = 0;
  int64_t last = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk_sums[chunk] <= 0) continue;
    last = chunk;
    *before = cumulative;
    cumulative += chunk_sums[chunk];
    if (cumulative > bound) break;
  }
  return last;
}

// The sum in a fixed order with short chains of additions.
static double sum_of(const float* weights, int64_t size) {
  constexpr int64_t kChains = 8;
  double sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= size; i += kChains) {
    for (int64_t chain = 0; chain < kChains; ++chain) sums[chain] += weights[i + chain];
  }
  for (; i < size; ++i) sums[0] += weights[i];
  return std::accumulate(sums, sums + kChains, 0.0);
}

int64_t draw_from(const float* weights, int64_t size, double bound) {
  constexpr int64_t kBlock = 128;
  double block_sums[kChunk / kBlock];
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock;
    block_sums[block] = sum_of(weights + begin, std::min(kBlock, size - begin));
  }
  double cumulative = 0;
  const int64_t begin = draw_chunk(block_sums, blocks, bound, &cumulative) * kBlock;
  int64_t last = begin;
  for (int64_t i = begin; i < std::min(begin + kBlock, size); ++i) {
    if (weights[i] <= 0) continue;
    last = i;
    cumulative += weights[i];
    if (cumulative > bound) break;
  }
  return last;
}

int64_t draw(const Row& row, double uniform) {
  if (row.sampling.greedy()) return row.argmax();
  const double bound = uniform * row.sum;
  double before = 0;
  const int64_t chunk = draw_chunk(row.chunk_sums, row.chunks(), bound, &before);
  const int64_t begin = chunk * kChunk;
  float weights[kChunk];
  row.kernels().weigh(row.logits.at(begin), row.chunk_size(chunk), row.weighting, 1.0f, weights);
  return begin + draw_from(weights, row.chunk_size(chunk), bound - before);
}

// Gumbel-max over a row, token by token.
class Race {
 public:
  Race(const Row& row, const NoiseKey& key) : row_(row), key_(key) {}

  int64_t winner() const { return token_; }

  // The bound that `may_reach` compares with, allowing for rounding.
  float least() const { return static_cast<float>(score_ * kLog2E - 1e-3); }

  void enter_group(int64_t group) {
    const uint32_t word = philox_word(key_.seed, key_.position, kLeastStream, group);
    const double least = -std::log(((word >> 4) + 0.5) * 0x1p-28) / kGroup;
    const int64_t first = group / kGroup * kTile + group % kGroup;
    for (uint32_t place = 0; place < kGroup; ++place) {
      const int64_t token = first + place * kGroup;
      if (token >= row_.logits.size) return;
      enter(token, least, place == least_place(word));
    }
  }

 private:
  void enter(int64_t token, double least, bool has_least) {
    const float x = row_.logit(token);
    if (!(x >= row_.weighting.cutoff)) return;
    const double weight = (double{x} - row_.weighting.max) / row_.sampling.temperature;
    double score = weight - std::log(least);
    if (score < score_) return;
    if (!has_least) {
      const uint32_t word = philox_word(key_.seed, key_.position, kOthersStream, token);
      score = weight - std::log(least - std::log((word + 0.5) * 0x1p-32));
    }
    if (score < score_ || (score == score_ && token > token_)) return;
    score_ = score;
    token_ = token;
  }

  const Row& row_;
  const NoiseKey key_;
  double score_ = -std::numeric_limits<double>::infinity();
  int64_t token_ = -1;
};

int64_t draw_coupled(const Row& row, const NoiseKey& key) {
  static_assert(kGroup == kLanes && kTile == kGroup * kLanes);
  const int64_t best = row.argmax();
  if (row.sampling.greedy()) return best;
  Race race(row, key);
  race.enter_group(group_of(static_cast<uint32_t>(best)));
  const int64_t groups = num_lane_maxima(row.logits.size);
  for (int64_t first = 0; first < groups; first += 2 * kGroup) {
    uint32_t groups_left = sampling_kernels().lists.may_reach(
        row.lane_maxima + first, row.weighting, key, first, race.least());
    if (first + kGroup >= groups) groups_left &= 0xffff;
    for (; groups_left != 0; groups_left &= groups_left - 1) {
      race.enter_group(first + __builtin_ctz(groups_left));
    }
  }
  return race.winner();
}

int64_t jobs_per_thread(int64_t logits_per_job) {
  return (kLogitsPerThread + logits_per_job - 1) / logits_per_job;
}

int64_t weighings_per_thread(int64_t logits_per_job) {
  return (kWeighingsPerThread + logits_per_job - 1) / logits_per_job;
}

RowBatch::RowBatch(int64_t capacity, int64_t size)
    : size_(size),
      chunks_(num_chunks(size)),
      maxima_(new float[capacity * chunks_ * kScratchPerChunk]),
      sums_(new double[capacity * chunks_]) {
  rows_.reserve(capacity);
}

Row& RowBatch::add(const Logits& logits, const Sampling& sampling, const uint32_t* allowed) {
  const int64_t offset = count() * chunks_;
  Row row{};
  row.logits = row.source = logits;
  row.sampling = sampling;
  row.allowed = allowed;
  if (allowed != nullptr) {
    copies_.emplace_back(new char[logits.size * logits.element_size()]);
    row.logits.data = copies_.back().get();
  }
  row.lane_maxima = maxima_.get() + offset * kScratchPerChunk;
  row.chunk_lane_maxima = row.lane_maxima + chunks_ * kMaximaPerChunk;
  row.chunk_maxima = row.chunk_lane_maxima + chunks_ * kLanes;
  row.chunk_sums = sums_.get() + offset;
  rows_.push_back(row);
  return rows_.back();
}

// Copies logits, with -inf for tokens that are not allowed; `begin` is a multiple of 32.
template <class Bits>
static void copy_allowed(const Row& row, int64_t begin, int64_t size, Bits minus_infinity) {
  const Bits* from = static_cast<const Bits*>(row.source.at(begin));
  Bits* to = static_cast<Bits*>(const_cast<void*>(row.logits.at(begin)));
  for (int64_t i = 0; i < size; i += 32) {
    const uint32_t word = row.allowed[(begin + i) / 32];
    const int64_t count = std::min<int64_t>(32, size - i);
    if (word == 0xffffffff) {
      std::memcpy(to + i, from + i, count * sizeof(Bits));
    } else if (word == 0) {
      std::fill(to + i, to + i + count, minus_infinity);
    } else {
      for (int64_t j = 0; j < count; ++j) to[i + j] = word >> j & 1 ? from[i + j] : minus_infinity;
    }
  }
}

static void mask_chunk(const Row& row, int64_t chunk) {
  const int64_t begin = chunk * kChunk, size = row.chunk_size(chunk);
  switch (row.logits.type) {
    case Element::kFloat32:
      return copy_allowed<uint32_t>(row, begin, size, 0xff800000);
    case Element::kBFloat16:
      return copy_allowed<uint16_t>(row, begin, size, 0xff80);
    default:
      return copy_allowed<uint16_t>(row, begin, size, 0xfc00);
  }
}

static void sum_chunk(const Row& row, int64_t chunk, const Weighting& weighting) {
  row.chunk_sums[chunk] = row.kernels().sum(row.logits.at(chunk * kChunk), row.chunk_size(chunk),
                                            row.maxima_of(chunk), weighting);
}

// Sums a chunk while it is in the nearest cache and the row's best logit is not known yet.
static void sum_below_own_max(const Row& row, int64_t chunk) {
  const float max = row.chunk_maxima[chunk];
  row.chunk_sums[chunk] = 0;
  if (!std::isfinite(max)) return;
  sum_chunk(row, chunk,
            weighting_below(max, row.sampling, -std::numeric_limits<float>::infinity()));
}

// Rescales the sums of the chunks, each relative to its own best logit, to that of the row.
static void rescale_sums(const Row& row) {
  for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
    const double below = (double{row.chunk_maxima[chunk]} - row.max) * row.weighting.scale;
    // If no weight of the chunk is above zero, its sum must not be either.
    const bool counts = row.chunk_maxima[chunk] >= row.weighting.cutoff;
    row.chunk_sums[chunk] = counts ? row.chunk_sums[chunk] * std::exp2(below) : 0.0;
  }
}

void RowBatch::scan() {
  if (rows_.empty()) return;
  constexpr int64_t kReadsPerWeighing = kLogitsPerThread / kWeighingsPerThread;
  const auto is_summed = [](const Row& row) { return row.is_summed_early(); };
  const int64_t summed = std::count_if(rows_.begin(), rows_.end(), is_summed);
  const int64_t reads = count() + kReadsPerWeighing * summed;
  const int64_t logits_per_job = std::min(size_, kChunk) * reads / count();
  parallel_for(count() * chunks_, jobs_per_thread(logits_per_job), [&](int64_t job) {
    Row& row = rows_[job / chunks_];
    const int64_t chunk = job % chunks_;
    if (chunk >= row.chunks()) return;
    if (row.allowed != nullptr) mask_chunk(row, chunk);
    row.chunk_maxima[chunk] = row.kernels().max(
        row.logits.at(chunk * kChunk), row.chunk_size(chunk),
        row.lane_maxima + chunk * kMaximaPerChunk, row.chunk_lane_maxima + chunk * kLanes);
    if (row.is_summed_early()) sum_below_own_max(row, chunk);
  });
  for (Row& row : rows_) {
    bool has_nan = false;
    row.max = -std::numeric_limits<float>::infinity();
    for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) {
      has_nan |= std::isnan(row.chunk_maxima[chunk]);
      row.max = std::max(row.max, row.chunk_maxima[chunk]);
    }
    row.valid = !has_nan && std::isfinite(row.max) && row.sampling.temperature >= 0;
  }
}

std::vector<Row*> RowBatch::valid_rows() {
  std::vector<Row*> valid;
  for (Row& row : rows_) {
    if (row.valid) valid.push_back(&row);
  }
  return valid;
}

void RowBatch::weigh(const std::vector<Row*>& rows) {
  std::vector<Row*> filtered, whole;
  for (Row* row : rows) {
    if (row->is_filtered()) {
      filtered.push_back(row);
      continue;
    }
    row->threshold = row->sampling.greedy() ? row->max : -std::numeric_limits<float>::infinity();
    row->weighting = weighting_of(*row, row->threshold);
    if (row->is_summed_early()) {
      rescale_sums(*row);
    } else {
      whole.push_back(row);
    }
  }
  // Filters keep few logits, so one thread processes a row from its threshold to its sums.
  parallel_for(filtered.size(), weighings_per_thread(size_), [&](int64_t i) {
    Row& row = *filtered[i];
    row.threshold = filter_threshold(row);
    row.weighting = weighting_of(row, row.threshold);
    for (int64_t chunk = 0; chunk < row.chunks(); ++chunk) sum_chunk(row, chunk, row.weighting);
  });
  const int64_t grain = weighings_per_thread(std::min(size_, kChunk));
  parallel_for(whole.size() * chunks_, grain, [&](int64_t job) {
    const Row& row = *whole[job / chunks_];
    if (job % chunks_ < row.chunks()) sum_chunk(row, job % chunks_, row.weighting);
  });
  for (Row* row : rows) {
    row->sum = std::accumulate(row->chunk_sums, row->chunk_sums + row->chunks(), 0.0);
  }
}

}  // namespace fastspec::cpu
