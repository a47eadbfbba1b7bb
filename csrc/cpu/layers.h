// The blocks of a decoder layer beside attention, for float32 rows.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

struct LayerKernels {
  // out[k] = x[k] / sqrt(mean(x^2) + eps) * weight[k]
  void (*rms_norm)(const float* x, const float* weight, int64_t size, float eps, float* out);
  // gate[i] = silu(gate[i]) * up[i]
  void (*silu_multiply)(float* gate, const float* up, int64_t size);
};

void rms_norm(const float* input, const float* weight, int64_t num_rows, int64_t size, float eps,
              float* out);

// out = (silu(input gate^T) * (input up^T)) down^T; weights are [outputs, inputs].
struct GatedMlpCall {
  const float* input;        // [num_rows, size]
  const float* gate_weight;  // [hidden, size]
  const float* up_weight;    // [hidden, size]
  const float* down_weight;  // [size, hidden]
  float* out;                // [num_rows, size]
  int64_t num_rows, size, hidden;
};

void gated_mlp(const GatedMlpCall& call);

}  // namespace fastspec::cpu
