// Top-k and top-p without sorting: a histogram search over the bits of the logits.
#pragma once
#include "cuda/row.cuh"

namespace fastspec::cuda {

// The lowest value with less than `need` of the weight above it.
struct Threshold {
  float value;  // -inf if all values together weigh less than `need`
  u64 kept;     // the weight of this value and those above
};

__device__ __forceinline__ void add_to(uint32_t* bin, uint32_t weight) { atomicAdd(bin, weight); }

// In two halves: shared memory has native 32-bit addition, but 64 bits need a compare-and-swap loop
// that retries once per other thread at the bin. Few weights reach the upper half.
__device__ __forceinline__ void add_to(u64* bin, u64 weight) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(bin);
  const uint32_t low = static_cast<uint32_t>(weight);
  const uint32_t carry = atomicAdd(halves, low) > ~low;
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
  if (high != 0) atomicAdd(halves + 1, high);
}

// Combines equal neighbours before adding to a histogram, where they would wait for each other.
template <class Bin>
class RunLength {
 public:
  __device__ explicit RunLength(Bin* bins) : bins_(bins) {}

  __device__ __forceinline__ void add(int bin, Bin weight) {
    if (bin != bin_) {
      flush();
      bin_ = bin;
      sum_ = 0;
    }
    sum_ += weight;
  }

  __device__ __forceinline__ void flush() {
    if (sum_ != 0) add_to(bins_ + bin_, sum_);
  }

 private:
  Bin* bins_;
  int bin_ = -1;
  Bin sum_ = 0;
};

// Merges the histograms of a team's blocks; afterwards each block has the total.
template <class Bin>
__device__ void merge_bins(const Team& team, Bin* bins) {
  team.sync();
  if (team.size() == 1) return;
  const int part = kBins / team.size();
  for (int i = threadIdx.x; i < part; i += blockDim.x) {
    Bin* here = bins + team.rank() * part + i;
    Bin sum = 0;
    for (int rank = 0; rank < team.size(); ++rank) sum += *team.of_block(here, rank);
    for (int rank = 0; rank < team.size(); ++rank) *team.of_block(here, rank) = sum;
  }
  team.sync();
}

// Finds the bin, from the highest one down, where `above` plus the sum reaches `need`.
template <class Bin>
__device__ Crossing find_crossing(Team& team, const Bin* bins, u64 above, u64 need) {
  const int per_thread = (kBins + blockDim.x - 1) / blockDim.x;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * per_thread;
  const int bottom = top - per_thread < -1 ? -1 : top - per_thread;
  u64 own = 0;
  for (int bin = top; bin > bottom; --bin) own += bins[bin];
  const u64 before = above + team.block_scan(own);
  if (before < need && need <= before + own) {
    u64 sum = before;
    int bin = top;
    while (sum + bins[bin] < need) sum += bins[bin--];
    team.memory().crossing = {sum, bins[bin], bin};
  }
  __syncthreads();
  return team.memory().crossing;
}

// `weigh` returns the weight of a logit, 0 if it is filtered out; Bin can hold the sum of all
// weights.
template <class Bin, class View, class Weigh>
__device__ Threshold search(Team& team, const View& view, u64 need, const Weigh& weigh) {
  // 16-bit formats have the last ten bits of the wider one all equal.
  const int levels = is_wide(view.row().element) ? 3 : 2;
  Bin* bins = reinterpret_cast<Bin*>(team.memory().bins);
  uint32_t prefix = 0, mask = 0;  // the bits of the key known so far
  Crossing crossing = {0, 0, -1};
#pragma unroll 1
  for (int level = 0; level < levels; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
    const uint32_t digit = level == 2 ? kBins / 2 - 1 : kBins - 1;
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) team.memory().crossing.bin = -1;  // all have read the last one
    RunLength<Bin> run(bins);
    view.pass([&](const float (&x)[kUnit], int64_t) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        const uint32_t key = to_key(x[j]);
        const Bin weight = weigh(x[j]);
        if (weight != 0 && ((key ^ prefix) & mask) == 0) run.add((key >> shift) & digit, weight);
      }
    });
    run.flush();
    merge_bins(team, bins);
    crossing = find_crossing(team, bins, crossing.above, need);
    if (crossing.bin < 0) return {-infinity(), 0};
    prefix |= static_cast<uint32_t>(crossing.bin) << shift;
    mask |= digit << shift;
  }
  // Bits below the known ones are 0 in a logit, and inverted in the key of a negative one.
  if ((prefix & 0x80000000u) == 0) prefix |= ~mask;
  return {from_key(prefix), crossing.above + crossing.at};
}

}  // namespace fastspec::cuda
