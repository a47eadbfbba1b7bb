#include "linear.h"

#include <algorithm>
#include <memory>

#include "arena.h"
#include "kernels.h"
#include "parallel.h"

namespace fastspec::cpu {

int64_t outputs_per_task(const PackedRows& rows) {
  constexpr int64_t kBytes = 32 * 1024;
  const int64_t bytes_per_output = std::max<int64_t>(1, rows.depth * size_of(rows.element));
  return std::max(kOutputTile, kBytes / bytes_per_output / kOutputTile * kOutputTile);
}

void multiply(const PackedRows& rows, const Product* products, int64_t count) {
  const LinearKernels& kernels = cpu::kernels().linear;
  const int64_t size = outputs_per_task(rows);
  const auto tasks_of = [&](int64_t i) { return (products[i].num_outputs + size - 1) / size; };
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) tasks += tasks_of(i);
  share_tasks(tasks, [&](int64_t task) {
    int64_t i = 0;
    for (; task >= tasks_of(i); ++i) task -= tasks_of(i);
    const int64_t first = task * size;
    kernels.multiply(rows, products[i], first, std::min(first + size, products[i].num_outputs));
  });
}

void linear(const LinearCall& call) {
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  const LinearKernels& kernels = cpu::kernels().linear;
  Arena measure;
  measure.take<char>(kernels.packed_bytes(call.element, call.num_rows, call.depth));
  const std::unique_ptr<Line[]> memory(new Line[measure.used]);
  const PackedRows rows = {call.element, call.num_rows, call.depth, memory.get()};
  kernels.pack(call.input, call.element, rows);
  const Product product = {call.weight, call.bias, call.out, call.element, call.num_outputs};
  multiply(rows, &product, 1);
}

}  // namespace fastspec::cpu
