#include "store_kv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/half.h"
#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;
constexpr int64_t kTokensPerTask = 16;

void copy_token(const StoreCall& call, const StoreSide& side, int64_t token, int64_t slot) {
  const char* from = side.from + token * side.token_stride;
  char* to = slot_of(call, side, slot);
  if (side.head_stride == call.head_bytes) {
    std::memcpy(to, from, call.num_heads * call.head_bytes);
    return;
  }
  for (int64_t g = 0; g < call.num_heads; ++g) {
    std::memcpy(to + g * call.head_bytes, from + g * side.head_stride, call.head_bytes);
  }
}

// An element type: its storage, and conversion to float32.
struct Float32 {
  float value;
  static Float32 from(float x) { return {x}; }
  float wide() const { return value; }
};

struct BFloat16 {
  uint16_t bits;
  static BFloat16 from(float x) { return {bfloat16_from_float(x)}; }
  float wide() const { return bfloat16_to_float(bits); }
};

struct Float16 {
  uint16_t bits;
  static Float16 from(float x) { return {float16_from_float(x)}; }
  float wide() const { return float16_to_float(bits); }
};

template <class T, class F>
void rotate_head(const T* from, const F* cos, const F* sin, int64_t size, T* to) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = from[i].wide(), second = from[i + half].wide();
    to[i] = T::from(first * cos[i].wide() - second * sin[i].wide());
    to[i + half] = T::from(second * cos[i + half].wide() + first * sin[i + half].wide());
  }
}

template <class T, class F>
void rotate_token(const StoreCall& call, int64_t token, int64_t slot) {
  const Rotation& rotation = call.rotation;
  const F* cos = static_cast<const F*>(rotation.cos) + token * rotation.cos_stride;
  const F* sin = static_cast<const F*>(rotation.sin) + token * rotation.sin_stride;
  const int64_t rotated = rotation.size * static_cast<int64_t>(sizeof(T));
  const char* from = call.key.from + token * call.key.token_stride;
  char* to = slot_of(call, call.key, slot);
  for (int64_t g = 0; g < call.num_heads; ++g) {
    rotate_head(reinterpret_cast<const T*>(from), cos, sin, rotation.size,
                reinterpret_cast<T*>(to));
    std::memcpy(to + rotated, from + rotated, call.head_bytes - rotated);
    from += call.key.head_stride;
    to += call.head_bytes;
  }
}

template <class T>
void rotate_as(Element factors, const StoreCall& call, int64_t token, int64_t slot) {
  return factors == Element::kFloat32 ? rotate_token<T, Float32>(call, token, slot)
                                      : rotate_token<T, T>(call, token, slot);
}

void store_key(const StoreCall& call, int64_t token, int64_t slot) {
  const Rotation& rotation = call.rotation;
  if (rotation.cos == nullptr) return copy_token(call, call.key, token, slot);
  switch (rotation.key_element) {
    case Element::kBFloat16:
      return rotate_as<BFloat16>(rotation.element, call, token, slot);
    case Element::kFloat16:
      return rotate_as<Float16>(rotation.element, call, token, slot);
    default:
      return rotate_token<Float32, Float32>(call, token, slot);
  }
}

}  // namespace

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

void store_token(const StoreCall& call, int64_t token) {
  const int64_t slot = call.slot_mapping[token];
  if (slot < 0) return;
  store_key(call, token, slot);
  copy_token(call, call.value, token, slot);
}

void store_kv(const StoreCall& call) {
  check_slots(call);
  const int64_t bytes = call.num_tokens * call.num_heads * call.head_bytes;
  const int64_t num_tasks = (call.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  for_each_task(num_tasks, workers_for(bytes, kBytesPerThread), [&](int64_t task, int64_t) {
    const int64_t first = task * kTokensPerTask;
    const int64_t last = std::min(first + kTokensPerTask, call.num_tokens);
    for (int64_t token = first; token < last; ++token) store_token(call, token);
  });
}

}  // namespace fastspec::cpu
