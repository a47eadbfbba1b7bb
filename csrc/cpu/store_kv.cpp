#include "store_kv.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kSerialBytes = 1 << 17;
constexpr int64_t kTokensPerTask = 16;

void check_slots(const StoreCall& call) {
  const int64_t num_slots = call.num_blocks * call.block_size;
  for (int64_t t = 0; t < call.num_tokens; ++t) {
    const int64_t slot = call.slot_mapping[t];
    if (slot < -1 || slot >= num_slots) {
      throw std::invalid_argument("slot_mapping[" + std::to_string(t) +
                                  "]: expected -1 or a slot below " + std::to_string(num_slots) +
                                  ", got " + std::to_string(slot));
    }
  }
}

void copy_token(const StoreCall& call, const StoreSide& side, int64_t token, int64_t slot) {
  const char* from = side.from + token * side.token_stride;
  char* to = side.cache + slot / call.block_size * side.block_stride +
             slot % call.block_size * side.slot_stride;
  if (side.head_stride == call.head_bytes) {
    std::memcpy(to, from, call.num_heads * call.head_bytes);
    return;
  }
  for (int64_t g = 0; g < call.num_heads; ++g) {
    std::memcpy(to + g * call.head_bytes, from + g * side.head_stride, call.head_bytes);
  }
}

}  // namespace

void store_kv(const StoreCall& call) {
  check_slots(call);
  const int64_t bytes = call.num_tokens * call.num_heads * call.head_bytes;
  const int64_t num_tasks = (call.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  for_each_task(num_tasks, bytes < kSerialBytes ? 1 : num_threads(), [&](int64_t task, int64_t) {
    const int64_t first = task * kTokensPerTask;
    for (int64_t t = first; t < call.num_tokens && t < first + kTokensPerTask; ++t) {
      const int64_t slot = call.slot_mapping[t];
      if (slot < 0) continue;
      copy_token(call, call.key, t, slot);
      copy_token(call, call.value, t, slot);
    }
  });
}

}  // namespace fastspec::cpu
