// Writes new keys and values into the slots of a block-paged cache.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

// One of the two tensors; strides in bytes, heads of the cache are contiguous within a slot.
struct StoreSide {
  const char* from;
  char* cache;
  int64_t token_stride, head_stride, block_stride, slot_stride;
};

struct StoreCall {
  StoreSide key, value;
  const int64_t* slot_mapping;
  int64_t num_tokens, num_heads, head_bytes, num_blocks, block_size;
};

// Throws std::invalid_argument before anything is written if a slot is neither -1 nor in the cache.
void store_kv(const StoreCall& call);

}  // namespace fastspec::cpu
