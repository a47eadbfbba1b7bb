#include "machine.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace emulation {

Now now;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kCanaryBytes = 64;
constexpr int kWarp = 32;
constexpr unsigned char kPoison = 0xff, kCanary = 0xa5;

struct Barrier {
  unsigned expected;
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier{kWarp};
  const char* operation = nullptr;
  uint64_t words[2][kWarp];
};

struct Block {
  unsigned index, running;
  Barrier barrier;
  size_t shared_bytes;
  std::unique_ptr<unsigned char[]> memory;
  std::vector<Warp> warps;

  Block(unsigned number, unsigned threads, size_t shared)
      : index(number),
        running(threads),
        barrier{threads},
        shared_bytes(shared),
        memory(new unsigned char[shared + kCanaryBytes + 128]),
        warps(threads / kWarp) {
    std::memset(base(), kPoison, shared);
    std::memset(base() + shared, kCanary, kCanaryBytes);
  }

  unsigned char* base() const {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(memory.get()) + 127) &
                                            ~uintptr_t{127});
  }

  bool canary_lives() const {
    const unsigned char* end = base() + shared_bytes;
    return std::all_of(end, end + kCanaryBytes, [](unsigned char c) { return c == kCanary; });
  }
};

struct Fiber {
  Block* block;
  unsigned thread;
  bool started = false, done = false;
  const Barrier* awaited = nullptr;
  uint64_t seen = 0;
  const char* place = "";
  jmp_buf context;
  ucontext_t first;
};

uint64_t order_seed = 0;
unsigned threads_per_block, blocks_per_cluster;
const std::function<void()>* kernel_body;
std::vector<Block>* cluster_blocks;
Barrier cluster_barrier{0};
Fiber* current;
jmp_buf scheduler;
std::string failure;
std::vector<std::unique_ptr<unsigned char[]>> stacks;
std::map<std::pair<int, const void*>, size_t> allowed_bytes;  // by device and kernel

std::vector<unsigned> order_of(unsigned size) {
  std::vector<unsigned> order(size);
  std::iota(order.begin(), order.end(), 0u);
  if (order_seed == 1) std::reverse(order.begin(), order.end());
  if (order_seed > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(order_seed));
  return order;
}

std::string name_of(const Fiber& fiber) {
  return "block " + std::to_string(fiber.block->index) + " thread " + std::to_string(fiber.thread);
}

[[noreturn]] void fail(const std::string& message) {
  failure = name_of(*current) + ": " + message;
  _longjmp(scheduler, 1);
}

void pause() {
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

void wait(Barrier& barrier, const char* place) {
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  current->awaited = &barrier;
  current->seen = barrier.generation;
  current->place = place;
  pause();
}

void fiber_main() {
  (*kernel_body)();
  current->done = true;
  --current->block->running;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  now.thread.x = fiber.thread;
  now.block.x = fiber.block->index;
  now.block_size.x = threads_per_block;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

void prepare(Fiber& fiber, unsigned char* stack) {
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = stack;
  fiber.first.uc_stack.ss_size = kStackBytes;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, fiber_main, 0);
}

bool waits(const Fiber& fiber) {
  return fiber.awaited != nullptr && fiber.awaited->generation == fiber.seen;
}

void throw_deadlock(const std::vector<Fiber>& fibers) {
  std::string message = "deadlock:";
  const char* last = "";
  for (const Fiber& fiber : fibers) {
    if (fiber.done || std::strcmp(last, fiber.place) == 0) continue;
    last = fiber.place;
    message += " " + name_of(fiber) + " waits in " + fiber.place + ";";
  }
  const auto done = std::count_if(fibers.begin(), fibers.end(), [](auto& f) { return f.done; });
  throw std::runtime_error(message + " " + std::to_string(done) + " threads have ended");
}

// Runs each of these fibers, as far as it goes, once; whether any could move.
bool run_once(std::vector<Fiber>& fibers, unsigned first, const std::vector<unsigned>& order,
              size_t* left) {
  bool moved = false;
  for (const unsigned index : order) {
    Fiber& fiber = fibers[first + index];
    if (fiber.done || waits(fiber)) continue;
    fiber.awaited = nullptr;
    resume(fiber);
    if (!failure.empty()) throw std::runtime_error(failure);
    moved = true;
    *left -= fiber.done;
  }
  return moved;
}

void run_fibers(std::vector<Fiber>& fibers) {
  const auto size = static_cast<unsigned>(fibers.size());
  const bool eager = order_seed > 1;
  const unsigned group = eager ? kWarp : size;
  const std::vector<unsigned> groups = order_of(size / group), order = order_of(group);
  size_t left = size;
  while (left > 0) {
    bool moved = false;
    for (const unsigned index : groups) {
      while (run_once(fibers, index * group, order, &left)) moved = true;
    }
    if (!moved) throw_deadlock(fibers);
  }
}

void run_cluster(unsigned first_block, size_t shared_bytes) {
  std::vector<Block> blocks;
  blocks.reserve(blocks_per_cluster);
  std::vector<Fiber> fibers(size_t{blocks_per_cluster} * threads_per_block);
  while (stacks.size() < fibers.size()) stacks.emplace_back(new unsigned char[kStackBytes]);
  cluster_blocks = &blocks;
  cluster_barrier = {static_cast<unsigned>(fibers.size())};
  for (unsigned rank = 0; rank < blocks_per_cluster; ++rank) {
    blocks.emplace_back(first_block + rank, threads_per_block, shared_bytes);
    for (unsigned thread = 0; thread < threads_per_block; ++thread) {
      const size_t index = size_t{rank} * threads_per_block + thread;
      fibers[index].block = &blocks.back();
      fibers[index].thread = thread;
      prepare(fibers[index], stacks[index].get());
    }
  }
  run_fibers(fibers);
  for (const Block& block : blocks) {
    if (!block.canary_lives()) throw std::runtime_error("a write past the end of shared memory");
  }
}

}  // namespace

void set_order(uint64_t seed) { order_seed = seed; }

void run(unsigned blocks, unsigned cluster, unsigned threads, size_t shared_bytes,
         const std::function<void()>& kernel) {
  if (threads % kWarp != 0 || blocks % cluster != 0) throw std::runtime_error("uneven launch");
  failure.clear();
  kernel_body = &kernel;
  threads_per_block = threads;
  blocks_per_cluster = cluster;
  for (const unsigned index : order_of(blocks / cluster))
    run_cluster(index * cluster, shared_bytes);
}

void allow_shared_bytes(const void* kernel, size_t bytes) {
  if (!allowed_bytes.emplace(std::pair(now.device, kernel), bytes).second) {
    throw std::runtime_error("shared memory was asked for again");
  }
}

void check_shared_bytes(const void* kernel, size_t bytes) {
  const auto found = allowed_bytes.find({now.device, kernel});
  if (bytes > (found == allowed_bytes.end() ? 48 * 1024 : found->second)) {
    throw std::runtime_error("more shared memory than was asked for");
  }
}

unsigned char* dynamic_shared() { return current->block->base(); }

void wait_for_block() { wait(current->block->barrier, "__syncthreads"); }

void wait_for_cluster() { wait(cluster_barrier, "the barrier of the cluster"); }

void* of_block(const void* here, unsigned rank) {
  const Block& own = *current->block;
  const auto* address = static_cast<const unsigned char*>(here);
  if (address < own.base() || address >= own.base() + own.shared_bytes) {
    fail("an address outside its shared memory");
  }
  if (rank >= cluster_blocks->size()) fail("a block outside the cluster");
  const Block& other = (*cluster_blocks)[rank];
  if (other.running != threads_per_block) fail("shared memory of a block that is ending");
  return other.base() + (address - own.base());
}

const uint64_t* exchange(const char* operation, unsigned lanes, uint64_t word) {
  Warp& warp = current->block->warps[current->thread / kWarp];
  if (lanes != 0xffffffffu) fail("a part of a warp");
  if (warp.barrier.arrived == 0) warp.operation = operation;
  if (std::strcmp(warp.operation, operation) != 0) {
    fail(std::string(operation) + " while others are in " + warp.operation);
  }
  uint64_t* words = warp.words[warp.barrier.generation % 2];
  words[current->thread % kWarp] = word;
  wait(warp.barrier, operation);
  return words;
}

}  // namespace emulation
