// Whole Llama-type decoder layers, optimised for the few rows of a decoding step.
#pragma once
#include <cstdint>
#include <vector>

#include "layers.h"
#include "store_kv.h"
#include "tree_attention.h"

namespace fastspec::cpu {

struct Projection {
  const void* weight;  // [outputs, inputs]
  const void* bias;    // [outputs] or null
};

// Weights and caches share a type, the element of `attention`, unless those of the products are
// quantized: then `mlp` has their type, and biases are float32.
struct DecoderLayerCall {
  float* hidden;            // [num_rows, mlp.size], read and overwritten by all layers
  Norm norm;                // eps and shift of all; the weights are those below
  const float* embeddings;  // [num_rows, embedding_size] or null, which attention reads in front
  int64_t embedding_size;
  const void* attention_norm;
  const void* query_norm;          // [head_size] or null
  const void* key_norm;            // [head_size] or null
  const void* attention_out_norm;  // or null
  const void* mlp_norm;
  const void* mlp_out_norm;  // or null
  Projection query, key, value, output;
  MlpWeights mlp;
  const float* cos;  // [num_rows, rotary_size] or null
  const float* sin;
  int64_t cos_stride, sin_stride, rotary_size;
  AttentionCall attention;  // without query and out
  StoreCall store;          // without the data to store
  StoreCall kept;           // pages with a head for the halves of each input that is kept
  Element kept_element;
  std::vector<int64_t> kept_heads;  // heads that keep this layer's input
};

// Layers that share rows, indices and options. Checks the index tensors of all
// (std::invalid_argument names the bad one) before anything is written.
void decoder_layers(const std::vector<DecoderLayerCall>& calls);

}  // namespace fastspec::cpu
