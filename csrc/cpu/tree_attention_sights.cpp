// The index tensors of an attention call: bounds checks, and what each query row sees.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "tree_attention.h"

namespace fastspec::cpu {
namespace {

[[noreturn]] void fail(const std::string& field, int64_t index, int64_t least, int64_t most,
                       const std::string& why, int64_t actual) {
  throw std::invalid_argument(field + "[" + std::to_string(index) + "]: expected from " +
                              std::to_string(least) + " to " + std::to_string(most) + why +
                              ", got " + std::to_string(actual));
}

void check_sequence(const AttentionCall& call, int64_t b) {
  const int64_t first = call.cu_rows[b], last = call.cu_rows[b + 1], num_rows = last - first;
  if (last < first || last > call.num_rows) {
    fail("cu_rows", b + 1, first, call.num_rows, " (the rows of query)", last);
  }
  if (num_rows == 0) return;
  if (call.ancestor_mask != nullptr && num_rows > call.num_nodes) {
    throw std::invalid_argument("ancestor_mask: " + std::to_string(call.num_nodes) +
                                " nodes for sequence " + std::to_string(b) + " of " +
                                std::to_string(num_rows) + " rows");
  }
  const int64_t context = call.context_lens[b], capacity = call.max_blocks * call.block_size;
  const int64_t least = call.holds_queries ? num_rows : 0;
  if (context < least || context > capacity) {
    fail("context_lens", b, least, capacity, " (query rows in it; room in block_table)", context);
  }
  const int32_t* blocks = call.block_table + b * call.table_stride;
  for (int64_t i = 0; i * call.block_size < context; ++i) {
    if (blocks[i] < 0 || blocks[i] >= call.num_blocks) {
      fail("block_table", b, 0, call.num_blocks - 1, " in the used entries", blocks[i]);
    }
  }
}

struct Tree {
  const int64_t* mask;  // [num_rows, words]
  int64_t words, num_rows, root;

  bool sees(const Sight& sight, int64_t node) const {
    return (sight.nodes[node / 64] >> (node % 64) & 1) != 0;
  }

  // All before the root, and the nodes of the row's mask that exist.
  Sight sight(int64_t row) const {
    Sight sight = {{0, root}, root, {}};
    for (int64_t w = 0; w < words && w * 64 < num_rows; ++w) {
      const int64_t left = num_rows - w * 64;
      const uint64_t exist = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
      sight.nodes[w] = static_cast<uint64_t>(mask[row * words + w]) & exist;
    }
    return sight;
  }
};

int64_t depth_of(const Sight& sight) {
  return __builtin_popcountll(sight.nodes[0]) + __builtin_popcountll(sight.nodes[1]) - 1;
}

// Restricts each row to the window before its position; a node's is its depth below the root.
void apply_window(const Tree& tree, int64_t window, Sight* sights) {
  int64_t depths[kMaxTreeNodes];
  for (int64_t row = 0; row < tree.num_rows; ++row) depths[row] = depth_of(sights[row]);
  for (int64_t row = 0; row < tree.num_rows; ++row) {
    Sight& sight = sights[row];
    const int64_t oldest = depths[row] - window + 1;
    sight.places.first = std::clamp<int64_t>(tree.root + oldest, 0, tree.root);
    for (int64_t node = 0; node < tree.num_rows; ++node) {
      if (depths[node] < oldest) sight.nodes[node / 64] &= ~(uint64_t{1} << node % 64);
    }
  }
}

// What a row of a chain, or one that is not in the cache, sees.
Sight chain_sight(const AttentionCall& call, int64_t last) {
  const int64_t first = call.sliding_window > 0 ? last - call.sliding_window : 0;
  return {{std::max<int64_t>(first, 0), last}, last, {}};
}

}  // namespace

void check_indices(const AttentionCall& call) {
  if (call.cu_rows[0] != 0) fail("cu_rows", 0, 0, 0, "", call.cu_rows[0]);
  for (int64_t b = 0; b < call.batch; ++b) check_sequence(call, b);
  const int64_t end = call.cu_rows[call.batch];
  if (end != call.num_rows) {
    fail("cu_rows", call.batch, call.num_rows, call.num_rows, " (the rows of query)", end);
  }
}

std::vector<Sight> sights_of(const AttentionCall& call) {
  std::vector<Sight> sights;
  sights.reserve(call.num_rows);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t num_rows = call.cu_rows[b + 1] - call.cu_rows[b], context = call.context_lens[b];
    const int64_t words = (call.num_nodes + 63) / 64;
    const Tree tree = {call.ancestor_mask + b * call.num_nodes * words, words, num_rows,
                       context - num_rows};
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t last = call.holds_queries ? tree.root + row + 1 : context;
      sights.push_back(call.ancestor_mask != nullptr ? tree.sight(row) : chain_sight(call, last));
    }
    if (call.ancestor_mask != nullptr && call.sliding_window > 0) {
      apply_window(tree, call.sliding_window, sights.data() + call.cu_rows[b]);
    }
  }
  return sights;
}

}  // namespace fastspec::cpu
