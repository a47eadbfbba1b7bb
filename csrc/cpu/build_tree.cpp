#include <algorithm>

#include "sampling.h"

namespace fastspec::cpu {

void build_tree(const int32_t* parents, int64_t batch, int64_t num_nodes, int32_t* depths,
                uint64_t* ancestor_mask) {
  const int64_t words = (num_nodes + 63) / 64;
  std::fill(ancestor_mask, ancestor_mask + batch * num_nodes * words, 0);
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* parent = parents + b * num_nodes;
    int32_t* depth = depths + b * num_nodes;
    uint64_t* masks = ancestor_mask + b * num_nodes * words;
    for (int64_t i = 0; i < num_nodes; ++i) {
      const bool is_child = i > 0 && parent[i] >= 0 && parent[i] < i && depth[parent[i]] >= 0;
      depth[i] = i == 0 ? 0 : is_child ? depth[parent[i]] + 1 : -1;
      if (depth[i] < 0) continue;
      uint64_t* mask = masks + i * words;
      if (is_child) std::copy_n(masks + parent[i] * words, words, mask);
      mask[i / 64] |= uint64_t{1} << (i % 64);
    }
  }
}

}  // namespace fastspec::cpu
