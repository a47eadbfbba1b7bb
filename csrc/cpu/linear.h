// The product of a few rows with a weight matrix, as one verification step needs it.
#pragma once
#include <cstdint>

#include "elements.h"

namespace fastspec::cpu {

// out[t][n] = sum over k of input[t][k] * weight[n][k], plus bias[n]; all contiguous, of one type.
struct LinearCall {
  const void* input;   // [num_rows, depth]
  const void* weight;  // [num_outputs, depth]
  const void* bias;    // [num_outputs] or null
  void* out;           // [num_rows, num_outputs]
  int64_t num_rows, num_outputs, depth;
  Element element;
};

struct LinearKernels {
  // The rows as float32, each padded with zeros to padded(depth).
  void (*widen_rows)(const LinearCall& call, float* rows);
  // Outputs first..last of every row, from the widened rows.
  void (*multiply)(const LinearCall& call, const float* rows, int64_t first, int64_t last);
};

void linear(const LinearCall& call);

}  // namespace fastspec::cpu
