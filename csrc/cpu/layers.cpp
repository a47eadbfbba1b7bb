#include "layers.h"

#include <algorithm>
#include <memory>

#include "kernels.h"

namespace fastspec::cpu {

void rms_norm(const void* input, const Norm& norm, int64_t num_rows, int64_t size, void* out) {
  constexpr int64_t kRowsPerTask = 64;
  const LayerKernels& kernel = kernels().layers;
  const int64_t row_bytes = size * size_of(norm.element);
  const int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  constexpr int64_t kValuesPerThread = 1 << 16;
  parallel_for(tasks, kValuesPerThread / (kRowsPerTask * size), [&](int64_t task) {
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

MlpScratch take_mlp(const MlpWeights& weights, int64_t num_rows, Arena& arena) {
  return {take_rows(weights.element, num_rows, weights.size, arena),
          take_rows(weights.element, num_rows, weights.hidden, arena),
          arena.take(num_rows * weights.hidden), arena.take(num_rows * weights.hidden)};
}

void gated_mlp(const MlpWeights& weights, const MlpScratch& scratch, void* out, Element out_element,
               Team::Member& member) {
  const GatedProduct gated = {weights.gate,       weights.up,   weights.hidden,
                              weights.activation, scratch.gate, scratch.up};
  const int64_t outputs = outputs_of_gated_task(scratch.input);
  member.share_runs(divided_up(weights.hidden, outputs), [&](int64_t first, int64_t last) {
    kernels().linear.multiply_gated(scratch.input, gated, scratch.hidden, first * outputs,
                                    std::min(last * outputs, weights.hidden));
  });
  const Product down = {weights.down, nullptr, out, out_element, weights.size};
  multiply(scratch.hidden, &down, 1, member);
}

void gated_mlp(const MlpCall& call) {
  if (call.num_rows == 0) return;
  const Scratch<MlpScratch> scratch(
      [&](Arena& arena) { return take_mlp(call.weights, call.num_rows, arena); });
  const int64_t products = call.num_rows * products_of_a_row(call.weights);
  Team(workers_for(products, kProductsPerWorker), kMlpPhases + 1).run([&](Team::Member& member) {
    pack(call.input, call.input_element, scratch->input, member);
    gated_mlp(call.weights, *scratch, call.out, call.out_element, member);
  });
}

}  // namespace fastspec::cpu
