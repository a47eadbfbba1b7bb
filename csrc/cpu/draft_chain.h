// All steps of a draft in one call: a Llama-type model that reads the tokens it draws.
#pragma once
#include <cstdint>
#include <vector>

#include "decoder_layer.h"
#include "sampling.h"

namespace fastspec::cpu {

// The last product of a model.
struct Head {
  Projection projection;  // [num_columns, size]
  Element element;        // of its weights, which may be quantized
  int64_t num_columns;
  const int32_t* tokens;  // [num_columns], or null: column x is token x
};

struct DraftChainCall {
  // Their pages, context lengths and row sums are those of the first pass; hidden, embeddings,
  // rotation factors and slots are filled in for each pass.
  std::vector<DecoderLayerCall> layers;
  const int64_t* token_ids;  // [num_rows], of the first pass
  const void* embedding;     // [vocab_size, size]
  int64_t vocab_size;
  const void* embedding_norm;  // or null: the embeddings are the hidden states
  const void* states;          // [num_rows, size] with embedding_norm: those of the first pass
  void* own_states;            // [num_own, size], by slot, or null
  int64_t num_own;
  const void* norm;
  Head head;
  const float* cos;  // [num_positions, rotary_size] or null
  const float* sin;
  int64_t cos_stride, sin_stride, num_positions;
  SamplingParameters parameters;
  const float* uniform_samples;  // [batch, num_steps]
  const int32_t* num_tokens;     // [batch]
  int64_t num_steps;
  float least_probability;  // of a draft's tokens together; a draft ends where it falls below
  int32_t* out_token_ids;   // [batch, num_steps]
  int32_t* out_counts;      // [batch]
  void* out_logits;         // [batch, num_steps, num_columns] or null
};

// Checks indices, tokens and lengths of all passes (std::invalid_argument names the bad one) before
// anything is written.
void draft_chain(DraftChainCall call);

}  // namespace fastspec::cpu
