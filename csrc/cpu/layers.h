// The parts of a decoder layer other than attention. Activations are float32 inside.
#pragma once
#include <cstdint>

#include "linear.h"

namespace fastspec::cpu {

// Weights of a normalisation; a row is scaled by shift + weight.
struct Norm {
  const void* weight;
  Element element;
  float eps, shift;
};

struct LayerKernels {
  // out[k] = x[k] / sqrt(mean(x^2) + eps) * (shift + weight[k])
  void (*rms_norm)(const float* x, const Norm& norm, int64_t size, float* out);
  // Rotates the two halves of x[0..size] by the factors cos and sin.
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t size);
  // to[i] += from[i]
  void (*add)(const float* from, int64_t size, float* to);
  void (*widen)(const void* from, Element element, int64_t size, float* to);
  void (*narrow)(const float* from, int64_t size, Element element, void* to);
};

// Rows [num_rows, size] have the type of the weights.
void rms_norm(const void* input, const Norm& norm, int64_t num_rows, int64_t size, void* out);

// out = (activation(input gate^T) * (input up^T)) down^T; weights are [outputs, inputs].
struct MlpWeights {
  const void* gate;  // [hidden, size]
  const void* up;    // [hidden, size]
  const void* down;  // [size, hidden]
  int64_t size, hidden;
  Element element;
  Activation activation;
};

// Multiply-adds.
inline int64_t products_of_a_row(const MlpWeights& weights) {
  return 3 * weights.size * weights.hidden;
}

struct MlpScratch {
  PackedRows input, hidden;
  float *gate, *up;  // [num_rows, hidden]
};

MlpScratch take_mlp(const MlpWeights& weights, int64_t num_rows, Arena& arena);

// Phases: compute out [num_rows, size] from the rows in scratch.input.
constexpr int64_t kMlpPhases = 2;
void gated_mlp(const MlpWeights& weights, const MlpScratch& scratch, void* out, Element out_element,
               Team::Member& member);

// Rows [num_rows, size] are float32 or have the type of the weights.
struct MlpCall {
  MlpWeights weights;
  const void* input;
  Element input_element;
  void* out;
  Element out_element;
  int64_t num_rows;
};

void gated_mlp(const MlpCall& call);

}  // namespace fastspec::cpu
