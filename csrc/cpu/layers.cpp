#include "layers.h"

#include <algorithm>
#include <memory>

#include "arena.h"
#include "kernels.h"
#include "parallel.h"

namespace fastspec::cpu {

void rms_norm(const void* input, const Norm& norm, int64_t num_rows, int64_t size, void* out) {
  constexpr int64_t kRowsPerTask = 64;
  const LayerKernels& kernel = kernels().layers;
  const int64_t row_bytes = size * size_of(norm.element);
  const int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  parallel_for(tasks, 1, [&](int64_t task) {
    const std::unique_ptr<float[]> values(new float[size]);
    const int64_t last = std::min((task + 1) * kRowsPerTask, num_rows);
    for (int64_t row = task * kRowsPerTask; row < last; ++row) {
      const char* from = static_cast<const char*>(input) + row * row_bytes;
      char* to = static_cast<char*>(out) + row * row_bytes;
      kernel.widen(from, norm.element, size, values.get());
      kernel.rms_norm(values.get(), norm, size, values.get());
      kernel.narrow(values.get(), size, norm.element, to);
    }
  });
}

// Gate, up and activation of the same outputs in one task; gate [num_rows, hidden] is the result.
static void multiply_gated(const PackedRows& rows, const MlpWeights& weights, float* gate,
                           float* up) {
  const KernelTable& kernel = kernels();
  const int64_t hidden = weights.hidden;
  const Product gates = {weights.gate, nullptr, gate, Element::kFloat32, hidden};
  const Product ups = {weights.up, nullptr, up, Element::kFloat32, hidden};
  const int64_t size =
      std::max(kOutputTile, outputs_per_task(rows) / 2 / kOutputTile * kOutputTile);
  share_tasks((hidden + size - 1) / size, [&](int64_t task) {
    const int64_t first = task * size, last = std::min(first + size, hidden);
    kernel.linear.multiply(rows, gates, first, last);
    kernel.linear.multiply(rows, ups, first, last);
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      const int64_t at = row * hidden + first;
      kernel.layers.gate(gate + at, up + at, last - first, weights.activation);
    }
  });
}

struct MlpScratch {
  char* input;   // packed
  char* hidden;  // packed
  float *gate, *up;
};

static MlpScratch take_scratch(const MlpCall& call, Arena& arena) {
  const LinearKernels& kernel = kernels().linear;
  const MlpWeights& weights = call.weights;
  return {arena.take<char>(kernel.packed_bytes(weights.element, call.num_rows, weights.size)),
          arena.take<char>(kernel.packed_bytes(weights.element, call.num_rows, weights.hidden)),
          arena.take(call.num_rows * weights.hidden), arena.take(call.num_rows * weights.hidden)};
}

void gated_mlp(const MlpCall& call) {
  if (call.num_rows == 0) return;
  const LinearKernels& kernel = kernels().linear;
  const MlpWeights& weights = call.weights;
  Arena measure;
  take_scratch(call, measure);
  const std::unique_ptr<Line[]> memory(new Line[measure.used]);
  Arena arena{memory.get()};
  const MlpScratch scratch = take_scratch(call, arena);
  const PackedRows input = {weights.element, call.num_rows, weights.size, scratch.input};
  kernel.pack(call.input, call.input_element, input);
  multiply_gated(input, weights, scratch.gate, scratch.up);
  const PackedRows hidden = {weights.element, call.num_rows, weights.hidden, scratch.hidden};
  kernel.pack(scratch.gate, Element::kFloat32, hidden);
  const Product down = {weights.down, nullptr, call.out, call.out_element, weights.size};
  multiply(hidden, &down, 1);
}

}  // namespace fastspec::cpu
