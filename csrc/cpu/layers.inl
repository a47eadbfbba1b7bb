// Normalisation and activation, one row at a time; sums run in one fixed order.
#include <cmath>

#include "lanes.h"
#include "layers.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  NativeF32 squares = {};
  int64_t k = 0;
  for (; k + kNativeLanes <= size; k += kNativeLanes) {
    const NativeF32 v = load_native(x + k);
    squares = multiply_add(v, v, squares);
  }
  float sum = total(squares);
  for (; k < size; ++k) sum += x[k] * x[k];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (k = 0; k + kNativeLanes <= size; k += kNativeLanes) {
    store_native(out + k, load_native(x + k) * scale * load_native(weight + k));
  }
  for (; k < size; ++k) out[k] = x[k] * scale * weight[k];
}

// x / (1 + e^-x); where e^-x overflows the result is -0.
FASTSPEC_INLINE NativeF32 silu(NativeF32 x) {
  const NativeF32 power = x * -kLog2E;
  const NativeF32 bounded = power > 126.0f ? native(126.0f) : power;
  return x / (1.0f + exp2(bounded));
}

void silu_multiply(float* gate, const float* up, int64_t size) {
  int64_t i = 0;
  for (; i + kNativeLanes <= size; i += kNativeLanes) {
    store_native(gate + i, silu(load_native(gate + i)) * load_native(up + i));
  }
  for (; i < size; ++i) gate[i] = silu(native(gate[i]))[0] * up[i];
}

constexpr LayerKernels kLayers = {rms_norm, silu_multiply};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
