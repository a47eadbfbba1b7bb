// Writes new keys and values into the slots of a block-paged cache.
#pragma once
#include <cstdint>

#include "elements.h"

namespace fastspec::cpu {

// One of the two tensors; strides in bytes, heads of the cache are contiguous within a slot.
struct StoreSide {
  const char* from;
  char* cache;
  int64_t token_stride, head_stride, block_stride, slot_stride;
};

// The factors of a rotary embedding of the first `size` values of each key head; strides count
// elements. Without factors keys are copied.
struct Rotation {
  Element key_element, element;
  const void* cos;
  const void* sin;
  int64_t cos_stride, sin_stride, size;
};

struct StoreCall {
  StoreSide key, value;
  Rotation rotation;
  const int64_t* slot_mapping;
  int64_t num_tokens, num_heads, head_bytes, num_blocks, block_size;
};

// Where a slot of one side begins.
inline char* slot_of(const StoreCall& call, const StoreSide& side, int64_t slot) {
  return side.cache + slot / call.block_size * side.block_stride +
         slot % call.block_size * side.slot_stride;
}

// Throws std::invalid_argument if a slot is neither -1 nor in the cache.
void check_slots(const StoreCall& call);

// The slots must have been checked.
void store_token(const StoreCall& call, int64_t token);

// Throws like `check_slots`, before anything is written.
void store_kv(const StoreCall& call);

}  // namespace fastspec::cpu
