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
  const int64_t row_bytes = rows.depth * size_of(input_element);
  share_rows(rows, member, [&](int64_t row) {
    kernels().linear.pack_row(static_cast<const char*>(input) + row * row_bytes, input_element,
                              rows, row);
  });
}

void multiply(const PackedRows& rows, const Product* products, int64_t count,
              Team::Member& member) {
  const auto tiles_of = [&](int64_t i) { return output_tiles(products[i].num_outputs); };
  int64_t tiles = 0;
  for (int64_t i = 0; i < count; ++i) tiles += tiles_of(i);
  member.share_runs(tiles, [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < count && last > 0; ++i) {
      if (first < tiles_of(i)) {
        kernels().linear.multiply(rows, products[i], first * kOutputTile,
                                  std::min(last * kOutputTile, products[i].num_outputs));
      }
      first = std::max<int64_t>(first - tiles_of(i), 0);
      last -= tiles_of(i);
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
  const int64_t most = output_tiles(call.num_outputs);  // which are the tasks
  const int64_t workers = std::min(workers_for(products, kProductsPerWorker), most);
  Team(workers, 2).run([&](Team::Member& member) {
    pack(call.input, call.element, *rows, member);
    multiply(*rows, &product, 1, member);
  });
}

}  // namespace fastspec::cpu
