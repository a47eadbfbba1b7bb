// All steps of a draft in one call: a Llama-type model that reads the tokens it draws.
#pragma once
#include <cstdint>
#include <vector>

#include "decoder_layer.h"
#include "sampling.h"

namespace fastspec::cpu {

// The last product of a model, whose outputs are logits.
struct OutputHead {
  Projection projection;  // [num_columns, size]
  Element element;        // of its weights, which may be quantized
  int64_t num_columns;
  const int32_t* tokens;  // [num_columns], or null: column x is token x
};

struct DraftChainCall {
  // Their pages, context lengths and row sums are those of the first pass, and their rotation
  // factors those of all positions; each pass fills in those of its rows.
  std::vector<DecoderLayerCall> layers;
  const int64_t* token_ids;  // [num_rows], of the first pass
  const void* embedding;     // [vocab_size, size]
  int64_t vocab_size;
  const void* embedding_norm;  // or null: the embeddings are the hidden states
  const void* hidden;          // [num_rows, size] with embedding_norm: what the first pass reads
  void* hidden_cache;          // [slots of the pages, size] or null
  const void* norm;
  OutputHead head;
  int64_t num_positions;  // that have rotation factors
  SamplingParameters parameters;
  const float* uniform_samples;  // [batch, num_steps]
  const int32_t* num_tokens;     // [batch]
  int64_t num_steps;
  bool has_threshold;  // whether a draft ends where its sum of logprobs is below least_logprob
  float least_logprob;
  int32_t* out_token_ids;  // [batch, num_steps]
  int32_t* out_num_drawn;  // [batch]
  void* out_logits;        // [batch, num_steps, num_columns] or null
};

// Checks indices, tokens and lengths of all passes (std::invalid_argument names the bad one) before
// anything is written. Takes the call by value, as each pass rewrites its layers.
void draft_chain(DraftChainCall call);

}  // namespace fastspec::cpu
