#include "sampling.h"

#include <algorithm>
#include <limits>

#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Calls visit(prepared row, its index) for every row, in parallel; rows may be invalid.
template <class Visit>
void each_prepared_row(const LogitsMatrix& logits, const SamplingParameters& parameters,
                       const Visit& visit) {
  for (int64_t begin = 0; begin < logits.rows; begin += kRowsPerSlab) {
    const int64_t count = std::min(kRowsPerSlab, logits.rows - begin);
    RowBatch batch(count, logits.logits.size);
    for (int64_t i = begin; i < begin + count; ++i) {
      batch.add(logits.row(i), parameters.at(i), logits.allowed(i));
    }
    batch.scan();
    batch.weigh(batch.valid_rows());
    parallel_for(count, jobs_per_thread(logits.logits.size),
                 [&](int64_t i) { visit(batch[i], begin + i); });
  }
}

void write_probs(const Row& row, float* probs) {
  if (!row.valid || row.sampling.greedy()) {
    std::fill(probs, probs + row.logits.size, row.valid ? 0.0f : kNaN);
    if (row.valid) probs[row.argmax()] = 1.0f;
    return;
  }
  row.kernels().weigh(row.logits.at(0), row.logits.size, row.weighting,
                      static_cast<float>(1.0 / row.sum), probs);
}

}  // namespace

Sampling SamplingParameters::at(int64_t index) const {
  Sampling row;
  if (temperature != nullptr) row.temperature = temperature[index];
  if (top_k != nullptr) row.top_k = top_k[index];
  if (top_p != nullptr) row.top_p = top_p[index];
  if (min_p != nullptr) row.min_p = min_p[index];
  return row;
}

void row_stats(const LogitsMatrix& logits, const SamplingParameters& parameters, float* logsumexp,
               float* threshold) {
  each_prepared_row(logits, parameters, [&](const Row& row, int64_t i) {
    logsumexp[i] = row.valid ? static_cast<float>(row.logsumexp()) : kNaN;
    threshold[i] = row.valid ? row.threshold : kNaN;
  });
}

void logits_to_probs(const LogitsMatrix& logits, const SamplingParameters& parameters,
                     float* probs) {
  each_prepared_row(logits, parameters, [&](const Row& row, int64_t i) {
    write_probs(row, probs + i * row.logits.size);
  });
}

void sample(const LogitsMatrix& logits, const SamplingParameters& parameters,
            const float* uniform_samples, int64_t uniform_stride, int32_t* token_ids,
            float* logprobs) {
  each_prepared_row(logits, parameters, [&](const Row& row, int64_t i) {
    const int64_t token = row.valid ? draw(row, uniform_samples[i * uniform_stride]) : -1;
    token_ids[i] = static_cast<int32_t>(token);
    logprobs[i] = row.valid ? static_cast<float>(row.log_prob(token)) : kNaN;
  });
}

void sample_coupled(const LogitsMatrix& logits, const SamplingParameters& parameters,
                    const int64_t* seed, const int64_t* position, int32_t* token_ids,
                    float* logprobs) {
  each_prepared_row(logits, parameters, [&](const Row& row, int64_t i) {
    const NoiseKey key = {static_cast<uint64_t>(seed[i]), static_cast<uint64_t>(position[i])};
    const int64_t token = row.valid ? draw_coupled(row, key) : -1;
    token_ids[i] = static_cast<int32_t>(token);
    logprobs[i] = row.valid ? static_cast<float>(row.log_prob(token)) : kNaN;
  });
}

}  // namespace fastspec::cpu
