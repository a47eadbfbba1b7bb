// Rows of logits prepared for sampling: best logit, filter threshold, and sums of weights by chunk.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "row_kernels.h"

namespace fastspec::cpu {

// The sampling parameters of one row; the defaults are off.
struct Sampling {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;

  bool greedy() const { return temperature == 0.0f; }
};

// `size` adjacent logits.
struct Logits {
  const void* data;
  int64_t size;
  Element type;

  int64_t element_size() const { return type == Element::kFloat32 ? 4 : 2; }
  const void* at(int64_t index) const {
    return static_cast<const char*>(data) + index * element_size();
  }
  // The same number of logits, `offset` elements further on.
  Logits from(int64_t offset) const { return {at(offset), size, type}; }
};

struct Row {
  Logits logits;  // where `allowed` is set, a copy that scan fills from `source`
  Sampling sampling;
  Logits source;
  const uint32_t* allowed;    // bit i % 32 of word i / 32 allows token i; null allows all
  bool likely_needed = true;  // whether weigh will likely be called for it
  // Filled by RowBatch::scan.
  float* lane_maxima;        // of the tiles
  float* chunk_lane_maxima;  // of the chunks
  float* chunk_maxima;
  float max;
  bool valid;
  // Filled by RowBatch::weigh; `threshold` is `max` where the row is greedy.
  double* chunk_sums;
  float threshold;
  Weighting weighting;
  double sum;

  const RowKernels& kernels() const {
    return sampling_kernels().rows[static_cast<int>(logits.type)];
  }
  int64_t chunks() const { return num_chunks(logits.size); }
  int64_t chunk_size(int64_t chunk) const;
  const float* maxima_of(int64_t chunk) const { return lane_maxima + chunk * kMaximaPerChunk; }
  bool is_filtered() const;
  // Whether scan sums the weights as well, which it can if only the temperature determines them.
  bool is_summed_early() const { return likely_needed && !is_filtered(); }
  // The lowest id with the largest logit.
  int64_t argmax() const;
  float logit(int64_t token) const;
  // ln of a token's weight over the sum of weights, ignoring filters.
  double log_prob(int64_t token) const;
  // The filtered probability, 0 for ids outside the row; not for greedy rows.
  double prob(int64_t token) const;
  double logsumexp() const;
};

// The weights of a row under a threshold; greedy rows have temperature 1 and no threshold.
Weighting weighting_of(const Row& row, float threshold);

// The lowest kept logit under top-k, top-p and min-p, in this order; -inf if none is on.
float filter_threshold(const Row& row);

// The id by inverse CDF: the first whose cumulative weight exceeds uniform * sum.
int64_t draw(const Row& row, double uniform);

// The id by Gumbel-max: the one with the largest (logit - max) / temperature + noise.
int64_t draw_coupled(const Row& row, const NoiseKey& key);

// The first of up to kChunk indices whose cumulative sum exceeds `bound`, or the last positive one.
int64_t draw_from(const float* weights, int64_t size, double bound);

// The first chunk whose cumulative sum exceeds `bound`, or the last positive one; `before` receives
// the sum of the chunks before it.
int64_t draw_chunk(const double* chunk_sums, int64_t chunks, double bound, double* before);

// The grain of a parallel loop whose jobs each read this many logits.
int64_t jobs_per_thread(int64_t logits_per_job);
// The same if the logits are weighed, which takes longer.
int64_t weighings_per_thread(int64_t logits_per_job);

// Rows to prepare at once; few enough to stay in the last-level cache between passes.
constexpr int64_t kRowsPerSlab = 64;

// Rows of any sizes that share scratch memory and parallel loops.
class RowBatch {
 public:
  // At most `capacity` rows of at most `size` logits.
  RowBatch(int64_t capacity, int64_t size);

  Row& add(const Logits& logits, const Sampling& sampling, const uint32_t* allowed = nullptr);
  Row& operator[](int64_t index) { return rows_[index]; }
  int64_t count() const { return static_cast<int64_t>(rows_.size()); }

  // Finds the best logit of every row and whether the row is valid; call it once, then weigh each
  // row at most once.
  void scan();
  std::vector<Row*> valid_rows();
  // Computes thresholds and sums of the given rows, which must be valid.
  void weigh(const std::vector<Row*>& rows);

 private:
  int64_t size_;
  int64_t chunks_;
  std::unique_ptr<float[]> maxima_;
  std::unique_ptr<double[]> sums_;
  std::vector<Row> rows_;
  std::vector<std::unique_ptr<char[]>> copies_;
};

}  // namespace fastspec::cpu
