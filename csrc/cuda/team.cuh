// The threads that process one row together: a thread block, or a cluster of them.
#pragma once
#include "cuda/device.cuh"

namespace fastspec::cuda {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kBins = 2048;

// The value of a histogram at which a search stopped, see filter.cuh.
struct Crossing {
  u64 above;
  u64 at;
  int32_t bin;  // -1: none
};

// Shared memory of each block in front of its part of a staged row.
struct TeamMemory {
  u64 partials[2][kMaxWarps];  // one per warp; alternating, so that one barrier suffices
  u64 block_partials[2][kMaxWarps];
  Crossing crossing;
  int64_t token;
  u64 bins[kBins];
};

struct WarpShare {
  u64 before;  // of the warps in front of this one, over all blocks of the team
  u64 own;
  u64 total;
};

// Every method that synchronises must be called by all threads of the team.
class Team {
 public:
  __device__ explicit Team(int32_t size)
      : memory_(reinterpret_cast<TeamMemory*>(dynamic_shared())),
        size_(size),
        rank_(static_cast<int>(blockIdx.x % size)),
        warp_(threadIdx.x / kWarp),
        num_warps_(blockDim.x / kWarp) {}

  __device__ int64_t index() const { return blockIdx.x / size_; }  // of the team in the grid
  __device__ int size() const { return size_; }
  __device__ int rank() const { return rank_; }
  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int warp() const { return rank_ * num_warps_ + warp_; }  // over all blocks
  __device__ int block_warp() const { return warp_; }
  __device__ int num_warps() const { return size_ * num_warps_; }
  __device__ TeamMemory& memory() const { return *memory_; }
  __device__ uint4* stage() const { return reinterpret_cast<uint4*>(memory_ + 1); }

  // The same place in the shared memory of another block of the team.
  template <class T>
  __device__ T* of_block(T* here, int rank) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (size_ > 1) return static_cast<T*>(__cluster_map_shared_rank(here, rank));
#endif
    return here;
  }

  __device__ void sync() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (size_ > 1) {
      __cluster_barrier_arrive();
      __cluster_barrier_wait();
      return;
    }
#endif
    __syncthreads();
  }

  // Reduces the values of all threads by an associative and commutative operation.
  template <class T, class Op>
  __device__ T all_reduce(T value, T identity, const Op& op) {
    publish(warp_reduce(value, op));
    value = identity;
    for (int i = lane(); i < num_warps(); i += kWarp) value = op(value, published<T>(i));
    turn_ ^= 1;
    return warp_reduce(value, op);
  }

  __device__ WarpShare share(u64 value) {
    const auto plus = [](u64 a, u64 b) { return a + b; };
    const u64 own = warp_reduce(value, plus);
    publish(own);
    u64 before = 0, total = 0;
    for (int i = lane(); i < num_warps(); i += kWarp) {
      const u64 other = published<u64>(i);
      total += other;
      if (i < warp()) before += other;
    }
    turn_ ^= 1;
    return {warp_reduce(before, plus), own, warp_reduce(total, plus)};
  }

  // The sum of the values of the threads of this block in front of this one.
  __device__ u64 block_scan(u64 value) {
    const u64 inclusive = warp_scan(value);
    if (lane() == kWarp - 1) memory_->block_partials[block_turn_][warp_] = inclusive;
    __syncthreads();
    u64 before = 0;
    for (int i = 0; i < warp_; ++i) before += memory_->block_partials[block_turn_][i];
    block_turn_ ^= 1;
    return before + inclusive - value;
  }

  __device__ u64 warp_scan(u64 value) const {
    for (int step = 1; step < kWarp; step *= 2) {
      const u64 other = __shfl_up_sync(kAllLanes, value, step);
      if (lane() >= step) value += other;
    }
    return value;
  }

  template <class T, class Op>
  __device__ T warp_reduce(T value, const Op& op) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value = op(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    return value;
  }

 private:
  template <class T>
  __device__ void publish(T value) const {
    u64 word = 0;
    memcpy(&word, &value, sizeof(value));
    if (lane() == 0) memory_->partials[turn_][warp_] = word;
    sync();
  }

  template <class T>
  __device__ T published(int warp) const {
    u64* here = &memory_->partials[turn_][warp % num_warps_];
    const u64 word = *of_block(here, warp / num_warps_);
    T value;
    memcpy(&value, &word, sizeof(value));
    return value;
  }

  TeamMemory* memory_;
  int size_, rank_, warp_, num_warps_;
  int turn_ = 0, block_turn_ = 0;
};

}  // namespace fastspec::cuda
