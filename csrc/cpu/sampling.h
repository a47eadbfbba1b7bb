// The ops on raw pointers; bindings_cpu.cpp unpacks the tensors.
#pragma once
#include <cstdint>

#include "row.h"

namespace fastspec::cpu {

// A [rows, size] matrix of logits; the last dimension is contiguous.
struct LogitsMatrix {
  Logits logits;
  int64_t rows;
  int64_t stride;  // in elements

  Logits row(int64_t index) const { return logits.from(index * stride); }
};

// One value per row or per sequence; a null pointer is off for all.
struct SamplingParameters {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;

  Sampling at(int64_t index) const;
};

void row_stats(const LogitsMatrix& logits, const SamplingParameters& parameters, float* logsumexp,
               float* threshold);

void logits_to_probs(const LogitsMatrix& logits, const SamplingParameters& parameters,
                     float* probs);

void sample(const LogitsMatrix& logits, const SamplingParameters& parameters,
            const float* uniform_samples, int64_t uniform_stride, int32_t* token_ids,
            float* logprobs);

struct VerifyChainInputs {
  LogitsMatrix target;
  const LogitsMatrix* draft;  // of K rows for each sequence, or null: point masses
  const int32_t* cu_rows;
  const int32_t* draft_token_ids;  // [B, K]
  const float* uniform_samples;    // [B, K + 1]
  SamplingParameters parameters;
  int64_t batch;
  int64_t num_draft;
  double lenience;
};

struct VerifyChainOutputs {
  int32_t* output_token_ids;  // [B, K + 1]
  int32_t* accepted_len;
  float* logprobs;  // [B, K + 1]
};

void verify_chain(const VerifyChainInputs& inputs, const VerifyChainOutputs& outputs);

}  // namespace fastspec::cpu
