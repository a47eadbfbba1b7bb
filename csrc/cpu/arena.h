// Scratch memory of a call in a single allocation.
#pragma once
#include <cstdint>
#include <memory>

namespace fastspec::cpu {

struct alignas(64) Line {
  char bytes[64];
};

// Allocates uninitialised memory in cache lines; without a base it only measures.
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

// The result of `take(arena)`, with its own memory.
template <class T>
class Scratch {
 public:
  template <class Take>
  explicit Scratch(const Take& take) {
    Arena measure;
    take(measure);
    memory_.reset(new Line[measure.used]);
    Arena arena{memory_.get()};
    parts_ = take(arena);
  }
  const T& operator*() const { return parts_; }
  const T* operator->() const { return &parts_; }

 private:
  std::unique_ptr<Line[]> memory_;
  T parts_;
};

}  // namespace fastspec::cpu
