// Moves the accepted nodes of token trees to their places in the text, in a block-paged cache.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

// Strides, equal for both caches, are in bytes; a slot's values are contiguous.
struct CompactCall {
  char* caches[2];  // keys and values, [num_layers, num_blocks, block_size] slots
  const int32_t* block_table;
  const int32_t* prefix_lens;
  const int32_t* path;
  const int32_t* accepted_len;
  int64_t layer_stride, block_stride, slot_stride, slot_bytes, table_stride, path_stride;
  int64_t num_layers, num_blocks, block_size, batch, max_blocks, num_nodes;
};

// Throws std::invalid_argument before anything is written if a place has no slot.
void compact_kv(const CompactCall& call);

}  // namespace fastspec::cpu
