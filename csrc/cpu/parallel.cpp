#include "parallel.h"

#include <algorithm>
#include <chrono>

namespace fastspec::cpu {
namespace {

// All in ns.
constexpr int64_t kLate = 1'000'000;  // a sleeping thread wakes up within a tenth of it
constexpr int64_t kLongestPause = 500'000'000;
constexpr int64_t kShare = 30'000;  // about the least work that is worth a thread
constexpr int64_t kPausesPerLateness = 4;

// For all threads that call ops: until when they work alone, and the length of the last pause.
// These change the number of threads, but no result.
std::atomic<int64_t> alone_until{0}, last_pause{0};

int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

int64_t pause_after(int64_t lateness, int64_t duration, int64_t pause_before) {
  if (lateness < kLate || 2 * lateness < duration) return 0;
  return std::min(std::max(kPausesPerLateness * lateness, 2 * pause_before), kLongestPause);
}

int64_t workers_for(int64_t shares) {
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != 0) {
    throw std::runtime_error("torch_get_num_threads failed");
  }
  if (threads == 1 || shares <= 1) return 1;
  const int64_t until = alone_until.load(std::memory_order_relaxed);
  if (until != 0 && now() + kShare * shares < until) return 1;
  return std::min<int64_t>(threads, shares);
}

Arrivals::Arrivals() : start_(now()), latest_(start_) {}

void Arrivals::add() {
  const int64_t time = now();
  for (int64_t latest = latest_.load(std::memory_order_relaxed);
       latest < time && !latest_.compare_exchange_weak(latest, time);) {
  }
}

void Arrivals::end() const {
  const int64_t lateness = latest_.load(std::memory_order_relaxed) - start_, end = now();
  const int64_t before = last_pause.load(std::memory_order_relaxed);
  const int64_t pause = pause_after(lateness, end - start_, before);
  if (pause != before) last_pause.store(pause, std::memory_order_relaxed);
  if (pause > 0) alone_until.store(end + pause, std::memory_order_relaxed);
}

}  // namespace fastspec::cpu
