// Kernels with the faults that the emulation is there to find.
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>

namespace {

void barrier_that_one_thread_misses(int*) {
  if (threadIdx.x != 7) __syncthreads();
}

void barrier_that_one_block_misses(int*) {
  if (blockIdx.x != 1) __cluster_barrier_wait();
}

void shuffle_against_ballot(int*) {
  if (threadIdx.x % 32 == 3) {
    __ballot_sync(0xffffffffu, true);
  } else {
    __shfl_sync(0xffffffffu, 1, 0);
  }
}

void half_a_warp(int*) { __shfl_sync(0xffffu, 1, 0); }

void past_the_end(int*) { emulation::dynamic_shared()[256] = 0; }

void block_that_has_ended(int* out) {
  if (blockIdx.x == 0) return;
  __syncthreads();
  *out = *static_cast<int*>(__cluster_map_shared_rank(emulation::dynamic_shared(), 0));
}

// The last thread to run wins: there is no barrier between the writes.
void unordered_writes(int* out) { *out = static_cast<int>(threadIdx.x); }

// Read before anybody has written.
void unwritten_shared_memory(int* out) { *out = emulation::dynamic_shared()[0]; }

constexpr void (*kFaults[])(int*) = {
    barrier_that_one_thread_misses,
    barrier_that_one_block_misses,
    shuffle_against_ballot,
    half_a_warp,
    past_the_end,
    block_that_has_ended,
    unordered_writes,
    unwritten_shared_memory,
};

}  // namespace

// Two blocks of 64 threads with 256 bytes each; the message of what was found.
extern "C" int emulated_fault(int number, uint64_t order, char* message, int size) {
  emulation::set_order(order);
  int out = -1;
  try {
    emulation::run(2, 2, 64, 256, [&] { kFaults[number](&out); });
    std::snprintf(message, size, "%s", "nothing");
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
  }
  return out;
}
