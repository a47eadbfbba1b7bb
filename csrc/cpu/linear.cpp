#include "linear.h"

#include <algorithm>

#include "kernels.h"

namespace fastspec::cpu {

int64_t outputs_per_task(const PackedRows& rows) {
  constexpr int64_t kBytes = 32 * 1024;
  const int64_t bytes_per_output = std::max<int64_t>(1, rows.depth * size_of(rows.element));
  return std::max(kOutputTile, kBytes / bytes_per_output / kOutputTile * kOutputTile);
}

PackedRows take_rows(Element element, int64_t num_rows, int64_t depth, Arena& arena) {
  const int64_t bytes = kernels().linear.packed_bytes(element, num_rows, depth);
  return {element, num_rows, depth, arena.take<char>(bytes)};
}

void pack(const void* input, Element input_element, const PackedRows& rows, Team::Member& member) {
  const int64_t row_bytes = rows.depth * size_of(input_element);
  member.share(rows.num_rows, [&](int64_t row) {
    kernels().linear.pack_row(static_cast<const char*>(input) + row * row_bytes, input_element,
                              rows, row);
  });
}

void multiply(const PackedRows& rows, const Product* products, int64_t count,
              Team::Member& member) {
  const int64_t size = outputs_per_task(rows);
  const auto tasks_of = [&](int64_t i) { return (products[i].num_outputs + size - 1) / size; };
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) tasks += tasks_of(i);
  member.share(tasks, [&](int64_t task) {
    int64_t i = 0;
    for (; task >= tasks_of(i); ++i) task -= tasks_of(i);
    const int64_t first = task * size;
    kernels().linear.multiply(rows, products[i], first,
                              std::min(first + size, products[i].num_outputs));
  });
}

void linear(const LinearCall& call) {
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  const Scratch<PackedRows> rows(
      [&](Arena& arena) { return take_rows(call.element, call.num_rows, call.depth, arena); });
  const Product product = {call.weight, call.bias, call.out, call.element, call.num_outputs};
  Team(std::min(num_threads(), call.num_outputs / kOutputTile + 1), 2)
      .run([&](Team::Member& member) {
        pack(call.input, call.element, *rows, member);
        multiply(*rows, &product, 1, member);
      });
}

}  // namespace fastspec::cpu
