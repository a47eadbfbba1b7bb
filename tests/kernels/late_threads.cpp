// Regions of csrc/cpu/parallel.h on two threads of its own, of which one may come late.
#include <torch/csrc/stable/c/shim.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "cpu/parallel.h"

static int late_ms = 0;
using Task = void (*)(int64_t, int64_t, void*);

extern "C" int torch_get_num_threads(uint32_t* count) {
  *count = 2;
  return 0;
}

extern "C" int torch_parallel_for(int64_t begin, int64_t end, int64_t, Task task, void* context) {
  const int64_t middle = (begin + end) / 2;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    task(middle, end, context);
  });
  task(begin, middle, context);
  other.join();
  return 0;
}

static bool region(int late) {
  late_ms = late;
  int64_t sum[2] = {};
  fastspec::cpu::parallel_for(2, 1, [&](int64_t i) { sum[i] += i + 1; });
  return sum[0] == 1 && sum[1] == 2;
}

int main() {
  using fastspec::cpu::num_threads, fastspec::cpu::pause_after;
  std::printf("%d", static_cast<int>(num_threads()));
  std::printf(" %d", region(100));  // then 400 ms alone
  std::printf(" %d", static_cast<int>(num_threads()));
  std::printf(" %d", region(100));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  std::printf(" %d\n", static_cast<int>(num_threads()));
  for (const auto [lateness, before] : {std::pair<int64_t, int64_t>{999'999, 0},
                                        {8'000'000, 0},
                                        {8'000'000, 32'000'000},
                                        {900'000'000, 0}}) {
    std::printf("%d ", static_cast<int>(pause_after(lateness, before) / 1'000'000));
  }
}
