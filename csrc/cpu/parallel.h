// Work sharing on torch's one thread pool.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace fastspec::cpu {

// Calls body(i) for 0 <= i < count, at least `grain` neighbours on one thread.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Body& each = *static_cast<const Body*>(context);
    for (int64_t i = begin; i < end; ++i) each(i);
  };
  void* context = const_cast<void*>(static_cast<const void*>(&body));
  if (torch_parallel_for(0, count, grain, run, context) != 0) {
    throw std::runtime_error("torch_parallel_for failed");
  }
}

inline int64_t num_threads() {
  uint32_t count = 1;
  if (torch_get_num_threads(&count) != 0) {
    throw std::runtime_error("torch_get_num_threads failed");
  }
  return count;
}

// Calls body(task, worker) once for each task, first come first served; worker < workers.
template <class Body>
void for_each_task(int64_t count, int64_t workers, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    for (int64_t task = next++; task < count; task = next++) body(task, worker);
  };
  if (workers == 1) {
    work(0);
  } else {
    parallel_for(workers, 1, work);
  }
}

// Calls body(task) once for each task. Each thread takes neighbours in their order from a share of
// its own, then from the others': the cores of one machine rarely keep pace.
template <class Body>
void share_tasks(int64_t count, const Body& body) {
  const int64_t workers = std::min(num_threads(), count);
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const std::unique_ptr<Share[]> shares(new Share[workers]);
  for (int64_t i = 0; i < workers; ++i) {
    shares[i].next = count * i / workers;
    shares[i].end = count * (i + 1) / workers;
  }
  parallel_for(workers, 1, [&](int64_t worker) {
    for (int64_t i = 0; i < workers; ++i) {
      Share& share = shares[(worker + i) % workers];
      for (int64_t task = share.next++; task < share.end; task = share.next++) body(task);
    }
  });
}

}  // namespace fastspec::cpu
