// Edits rows of logits by each row's bias, history and path.
#pragma once
#include <cstdint>

#include "elements.h"

namespace fastspec::cpu {

struct PenalizeCall {
  void* logits;  // [rows, vocab], rows row_stride elements apart
  Element element;
  int64_t rows, vocab, row_stride;
  const int32_t* row_sequence;    // [rows]
  const int32_t* row_node;        // [rows]
  const int32_t* tree_token_ids;  // [batch, num_nodes]
  const int32_t* parents;         // [batch, num_nodes], or null: chains
  int64_t num_nodes;
  const int32_t* cu_history;  // [batch + 1]
  const int32_t* history_ids;
  const int32_t* history_counts;
  const int32_t* cu_bias;  // [batch + 1]
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* bias_until;
  const float* repetition_penalty;  // [batch], or null: off, as the next two
  const float* presence_penalty;
  const float* frequency_penalty;
};

// All indices and the order of ids must have been checked.
void penalize(const PenalizeCall& call);

}  // namespace fastspec::cpu
