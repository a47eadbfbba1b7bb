#include "layers.h"

#include <memory>

#include "kernels.h"
#include "linear.h"
#include "parallel.h"

namespace fastspec::cpu {

void rms_norm(const float* input, const float* weight, int64_t num_rows, int64_t size, float eps,
              float* out) {
  constexpr int64_t kRowsPerTask = 64;
  parallel_for(num_rows, kRowsPerTask, [&](int64_t row) {
    kernels().layers.rms_norm(input + row * size, weight, size, eps, out + row * size);
  });
}

static void multiply(const float* input, const float* weight, float* out, int64_t num_rows,
                     int64_t num_outputs, int64_t depth) {
  linear({input, weight, nullptr, out, num_rows, num_outputs, depth, Element::kFloat32});
}

void gated_mlp(const GatedMlpCall& call) {
  const int64_t count = call.num_rows * call.hidden;
  const std::unique_ptr<float[]> gate(new float[count]), up(new float[count]);
  multiply(call.input, call.gate_weight, gate.get(), call.num_rows, call.hidden, call.size);
  multiply(call.input, call.up_weight, up.get(), call.num_rows, call.hidden, call.size);
  parallel_for(call.num_rows, 64, [&](int64_t row) {
    kernels().layers.silu_multiply(gate.get() + row * call.hidden, up.get() + row * call.hidden,
                                   call.hidden);
  });
  multiply(gate.get(), call.down_weight, call.out, call.num_rows, call.size, call.hidden);
}

}  // namespace fastspec::cpu
