// Scratch memory of one call in one allocation.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

struct alignas(64) Line {
  char bytes[64];
};

// Hands out uninitialised memory by the cache line; without a base it only measures.
struct Arena {
  Line* base = nullptr;
  int64_t used = 0;

  template <class T = float>
  T* take(int64_t size) {
    T* const taken = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += (size * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    return taken;
  }
};

}  // namespace fastspec::cpu
