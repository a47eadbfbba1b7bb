#include "linear.h"

#include <algorithm>

#include "kernels.h"

namespace fastspec::cpu {

PackedRows take_rows(Element element, int64_t num_rows, int64_t depth, Arena& arena) {
  const int64_t bytes = kernels().linear.packed_bytes(element, num_rows, depth);
  return {element, num_rows, depth, arena.take<char>(bytes),
          kernels().linear.rows_together(element)};
}

void pack(const void* input, Element input_element, const PackedRows& rows, Team::Member& member) {
  share_rows(rows, member, [&](int64_t first, int64_t last) {
    kernels().linear.pack_rows(input, input_element, rows, first, last);
  });
}

void multiply(const PackedRows& rows, const Product* products, int64_t count,
              Team::Member& member) {
  const int64_t outputs = outputs_of_task(rows);
  const auto tasks_of = [&](int64_t i) { return divided_up(products[i].num_outputs, outputs); };
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) tasks += tasks_of(i);
  member.share_runs(tasks, [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < count && last > 0; ++i) {
      if (first < tasks_of(i)) {
        kernels().linear.multiply(rows, products[i], first * outputs,
                                  std::min(last * outputs, products[i].num_outputs));
      }
      first = std::max<int64_t>(first - tasks_of(i), 0);
      last -= tasks_of(i);
    }
  });
}

void linear(const LinearCall& call) {
  if (call.num_rows == 0 || call.num_outputs == 0) return;
  const Scratch<PackedRows> rows([&](Arena& arena) {
    return take_rows(call.weight_element, call.num_rows, call.depth, arena);
  });
  const Product product = {call.weight, call.bias, call.out, call.element, call.num_outputs};
  const int64_t products = call.num_rows * call.num_outputs * call.depth;
  const int64_t tasks = divided_up(call.num_outputs, outputs_of_task(*rows));
  const int64_t workers = std::min(workers_for(products, kProductsPerWorker), tasks);
  Team(workers, 2).run([&](Team::Member& member) {
    pack(call.input, call.element, *rows, member);
    multiply(*rows, &product, 1, member);
  });
}

}  // namespace fastspec::cpu
