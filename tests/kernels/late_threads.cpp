// Regions of csrc/cpu/parallel.h on two threads of its own, of which one may come late.
#include <torch/csrc/stable/c/shim.h>

#include <chrono>
#include <cstdio>
#include <thread>

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

// Whether all was done, by two threads of which one is late, after `work` of the other.
static bool region(int late, int work = 0) {
  late_ms = late;
  int64_t sum[2] = {};
  fastspec::cpu::parallel_for(2, 1, [&](int64_t i) {
    sum[i] += i + 1;
    if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(work));
  });
  return sum[0] == 1 && sum[1] == 2;
}

// The threads that take small work, and those that take some seconds of it.
static void print_workers() {
  using fastspec::cpu::workers_for;
  std::printf("%d %d ", static_cast<int>(workers_for(2)), static_cast<int>(workers_for(1 << 20)));
}

int main() {
  print_workers();
  std::printf("%d ", region(100));  // then 400 ms alone
  print_workers();
  std::printf("%d ", region(100));  // in one thread
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  print_workers();
  std::printf("%d ", region(100, 1000));  // it was not held up
  print_workers();
  std::printf("\n");
  const int64_t cases[][3] = {{999'999, 0, 0},
                              {8'000'000, 9'000'000, 0},
                              {8'000'000, 9'000'000, 32'000'000},
                              {8'000'000, 17'000'000, 32'000'000},
                              {900'000'000, 900'000'000, 0}};
  for (const auto& [lateness, duration, before] : cases) {
    const int64_t pause = fastspec::cpu::pause_after(lateness, duration, before);
    std::printf("%d ", static_cast<int>(pause / 1'000'000));
  }
}
