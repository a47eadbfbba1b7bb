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

// One worker computes gate, up and activation of the same outputs. With few rows it reads long runs
// of either weights; with many rows the activation follows while its inputs are still cached.
static void multiply_gated(const MlpWeights& weights, const MlpScratch& scratch,
                           Team::Member& member) {
  const KernelTable& kernel = kernels();
  const PackedRows& rows = scratch.input;
  const int64_t hidden = weights.hidden;
  const Product gates = {weights.gate, nullptr, scratch.gate, Element::kFloat32, hidden};
  const Product ups = {weights.up, nullptr, scratch.up, Element::kFloat32, hidden};
  constexpr int64_t kFewRows = 16;
  const int64_t outputs = outputs_of_task(rows);
  const int64_t most_outputs = rows.num_rows <= kFewRows ? hidden : outputs;
  member.share_runs(divided_up(hidden, outputs), [&](int64_t task, int64_t end_task) {
    const int64_t end = std::min(end_task * outputs, hidden);
    for (int64_t first = task * outputs; first < end; first += most_outputs) {
      const int64_t last = std::min(first + most_outputs, end);
      kernel.linear.multiply(rows, gates, first, last);
      kernel.linear.multiply(rows, ups, first, last);
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        const int64_t at = row * hidden + first;
        kernel.layers.gate(scratch.gate + at, scratch.up + at, last - first, weights.activation);
      }
    }
  });
}

void gated_mlp(const MlpWeights& weights, const MlpScratch& scratch, void* out, Element out_element,
               Team::Member& member) {
  multiply_gated(weights, scratch, member);
  pack(scratch.gate, Element::kFloat32, scratch.hidden, member);
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
