// The ops on raw pointers; bindings_cpu_sampling.cpp unpacks the tensors.
#pragma once
#include <cstdint>

#include "row.h"

namespace fastspec::cpu {

// A [rows, size] matrix of logits, and the allowed tokens of each row; last dimensions are
// contiguous.
struct LogitsMatrix {
  Logits logits;
  int64_t rows;
  int64_t stride;                     // in elements
  const uint32_t* bitmask = nullptr;  // null: all
  int64_t bitmask_stride = 0;

  Logits row(int64_t index) const { return logits.from(index * stride); }
  const uint32_t* allowed(int64_t index) const {
    return bitmask == nullptr ? nullptr : bitmask + index * bitmask_stride;
  }
};

// One value per row or per sequence; a null pointer means off.
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

void sample_coupled(const LogitsMatrix& logits, const SamplingParameters& parameters,
                    const int64_t* seed, const int64_t* position, int32_t* token_ids,
                    float* logprobs);

struct VerifyChainInputs {
  LogitsMatrix target;
  const LogitsMatrix* draft;       // of K rows for each sequence, or null: point masses
  const float* draft_logsumexp;    // [B, K], or null
  const int32_t* draft_token_map;  // [V], or null: the identity
  const int32_t* cu_rows;
  const int32_t* draft_token_ids;  // [B, K]
  const float* uniform_samples;    // [B, K + 1]
  SamplingParameters parameters;
  int64_t batch;
  int64_t num_draft;
  double lenience;
  bool block;
};

struct VerifyChainOutputs {
  int32_t* output_token_ids;  // [B, K + 1]
  int32_t* accepted_len;
  float* logprobs;  // [B, K + 1]
};

void verify_chain(const VerifyChainInputs& inputs, const VerifyChainOutputs& outputs);

enum class SiblingRule { kTargetOnly, kWithoutReplacement, kWithReplacement };

struct VerifyTreeInputs {
  LogitsMatrix target;
  const LogitsMatrix* draft;       // of N rows for each sequence, or null
  const int32_t* draft_token_map;  // [V], or null: the identity
  const int32_t* cu_rows;
  const int32_t* tree_token_ids;  // [B, N]
  const int32_t* parents;         // [B, N]
  const float* uniform_samples;   // [B, N + 1]
  SamplingParameters parameters;
  SiblingRule sibling_rule;
  int64_t batch;
  int64_t num_nodes;
};

struct VerifyTreeOutputs {
  int32_t* path;              // [B, N]
  int32_t* output_token_ids;  // [B, N]
  int32_t* accepted_len;
  float* logprobs;  // [B, N]
};

void verify_tree(const VerifyTreeInputs& inputs, const VerifyTreeOutputs& outputs);

// depths is [B, N], ancestor_mask [B, N, ceil(N / 64)].
void build_tree(const int32_t* parents, int64_t batch, int64_t num_nodes, int32_t* depths,
                uint64_t* ancestor_mask);

}  // namespace fastspec::cpu
