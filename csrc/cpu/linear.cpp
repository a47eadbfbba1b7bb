#include "linear.h"

#include <algorithm>
#include <memory>

#include "kernels.h"
#include "parallel.h"

namespace fastspec::cpu {

// Outputs of one task: whole register tiles, and enough bytes of weights to be worth a thread.
static int64_t outputs_per_task(const LinearCall& call) {
  constexpr int64_t kTile = 16, kBytes = 32 * 1024;
  const int64_t bytes_per_output = call.depth * (call.element == Element::kFloat32 ? 4 : 2);
  const int64_t wanted = kBytes / std::max<int64_t>(1, bytes_per_output);
  return std::max(kTile, wanted / kTile * kTile);
}

void linear(const LinearCall& call) {
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  const LinearKernels& kernels = cpu::kernels().linear;
  const std::unique_ptr<float[]> rows(new float[call.num_rows * padded(call.depth)]);
  kernels.widen_rows(call, rows.get());
  const int64_t size = outputs_per_task(call);
  const int64_t tasks = (call.num_outputs + size - 1) / size;
  parallel_for(tasks, 2, [&](int64_t task) {
    const int64_t first = task * size;
    kernels.multiply(call, rows.get(), first, std::min(first + size, call.num_outputs));
  });
}

}  // namespace fastspec::cpu
