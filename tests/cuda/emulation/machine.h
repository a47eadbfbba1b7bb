// Threads of a GPU as fibers of one CPU thread: each runs until it waits for others, in an order
// that a seed decides. What real threads would share or race for shows as results that depend on
// the seed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned size = 1) : x(size) {}
};

namespace emulation {

// What the running thread sees of itself.
struct Now {
  dim3 thread, block, block_size;
  int device = 0;
};
extern Now now;

// How blocks and threads take turns. 0: ascending, 1: descending; else shuffled, and each warp goes
// on until all of it waits for others.
void set_order(uint64_t seed);

// Runs a grid of clusters; throws std::runtime_error on a deadlock and other misuse.
void run(unsigned blocks, unsigned cluster, unsigned threads, size_t shared_bytes,
         const std::function<void()>& kernel);

// What the blocks of a kernel may have on the current device. To ask for it twice is an error, as
// is a launch that needs more: 48 KiB before it was asked for.
void allow_shared_bytes(const void* kernel, size_t bytes);
void check_shared_bytes(const void* kernel, size_t bytes);

unsigned char* dynamic_shared();
void wait_for_block();
void wait_for_cluster();
void* of_block(const void* here, unsigned rank);
// Gives every lane the words that all of them came with, 32 of them.
const uint64_t* exchange(const char* operation, unsigned lanes, uint64_t word);

}  // namespace emulation
