#include "parallel.h"

#include <algorithm>
#include <chrono>

namespace fastspec::cpu {
namespace {

constexpr int64_t kLate = 1'000'000;  // ns; a thread that sleeps comes within a tenth of it
constexpr int64_t kPauses = 4;        // of how late it was
constexpr int64_t kLongest = 500'000'000;

// Of all threads that call ops: ns of the clock until which they work alone, and how long the pause
// was that ended last. They change how many threads work, and no result.
std::atomic<int64_t> alone_until{0}, last_pause{0};

int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

int64_t pause_after(int64_t lateness, int64_t pause_before) {
  if (lateness < kLate) return 0;
  return std::min(std::max(kPauses * lateness, 2 * pause_before), kLongest);
}

int64_t num_threads() {
  uint32_t count = 1;
  if (torch_get_num_threads(&count) != 0) {
    throw std::runtime_error("torch_get_num_threads failed");
  }
  const bool is_alone = count > 1 && now() < alone_until.load(std::memory_order_relaxed);
  return is_alone ? 1 : count;
}

Region::Region() : start_(now()), latest_(start_) {}

void Region::arrive() {
  const int64_t time = now();
  for (int64_t latest = latest_.load(std::memory_order_relaxed);
       latest < time && !latest_.compare_exchange_weak(latest, time);) {
  }
}

void Region::end() const {
  const int64_t lateness = latest_.load(std::memory_order_relaxed) - start_;
  const int64_t pause = pause_after(lateness, last_pause.load(std::memory_order_relaxed));
  last_pause.store(pause, std::memory_order_relaxed);
  if (pause > 0) alone_until.store(now() + pause, std::memory_order_relaxed);
}

}  // namespace fastspec::cpu
