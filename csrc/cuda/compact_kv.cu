#include "cuda/device.cuh"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 128;  // 16 bytes each: 2 KiB, a slot of 8 heads of 128
constexpr int kMoves = 8;      // words that a thread holds at once
constexpr int kBlocks = 6;     // minimum; gives ptxas 80 registers, with 48 it might spill

// Offsets in bytes from the start of a layer.
struct Moves {
  int64_t from[kMoves];  // -1: nothing moves
  int64_t to[kMoves];
  int32_t count;  // below kMoves if the path has ended
};

// The offset of a place of a sequence, or -1 if it has no slot.
__device__ __forceinline__ int64_t offset_of(const CompactKvCall& call, int64_t b, int64_t prefix,
                                             int64_t node) {
  const int64_t place = prefix + node;
  if (prefix < 0 || place >= call.max_blocks * call.block_size) return -1;
  const int64_t number = place / call.block_size;
  const int64_t block = __ldg(call.block_table + b * call.table_stride + number);
  if (block < 0 || block >= call.num_blocks) return -1;
  return block * call.block_stride + (place - number * call.block_size) * call.slot_stride;
}

// The next moves of a path, one per lane of the first warp.
__device__ __forceinline__ void plan_moves(const CompactKvCall& call, int64_t b, int64_t first,
                                           int64_t length, Moves* moves) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t step = first + lane;
  const bool present = lane < kMoves && step < length;
  const int64_t node = present ? __ldg(call.path + b * call.path_stride + step) : -1;
  const int count = __ffs(static_cast<int>(__ballot_sync(kAllLanes, node < 0))) - 1;
  if (lane == 0) moves->count = count;
  if (lane >= count) return;
  const int64_t prefix = __ldg(call.prefix_lens + b);
  const int64_t from = offset_of(call, b, prefix, node);
  const int64_t to = offset_of(call, b, prefix, step + 1);
  moves->from[lane] = to < 0 || from == to ? -1 : from;
  moves->to[lane] = to;
}

// A block per sequence, keys or values of a layer, and kThreads words of the slots. A thread moves
// its own word of every slot independently of the others: in a round it reads before it writes, and
// later rounds read after everything written, because node i of a path is at least i + 1.
template <class Word>
__global__ void __launch_bounds__(kThreads, kBlocks)
    compact_kv_kernel(const CompactKvCall call, int64_t parts) {
  const int64_t index = blockIdx.x, part = index % parts, side = index / parts % 2;
  const int64_t layer = index / parts / 2 % call.num_layers,
                b = index / parts / 2 / call.num_layers;
  const int64_t word = part * kThreads + threadIdx.x;
  const bool inside = word * static_cast<int64_t>(sizeof(Word)) < call.slot_bytes;
  char* caches = (side == 0 ? call.key_caches : call.value_caches) + layer * call.layer_stride;
  const auto address = [&](int64_t offset) {
    return reinterpret_cast<Word*>(caches + offset) + word;
  };
  Moves* moves = reinterpret_cast<Moves*>(dynamic_shared());
  const int64_t length = smaller(__ldg(call.accepted_len + b), call.num_nodes);
  for (int64_t first = 0; first < length; first += kMoves) {
    __syncthreads();  // the previous moves may still be read
    if (threadIdx.x < kWarp) plan_moves(call, b, first, length, moves);
    __syncthreads();
    const int count = moves->count;
    Word entries[kMoves];
    bool moving[kMoves];
#pragma unroll
    for (int i = 0; i < kMoves; ++i) {
      moving[i] = inside && i < count && moves->from[i] >= 0;
      if (moving[i]) entries[i] = *address(moves->from[i]);
    }
#pragma unroll
    for (int i = 0; i < kMoves; ++i) {
      if (moving[i]) *address(moves->to[i]) = entries[i];
    }
    if (count < kMoves) return;
  }
}

template <class Word>
bool fits(const CompactKvCall& call) {
  return (reinterpret_cast<uintptr_t>(call.key_caches) |
          reinterpret_cast<uintptr_t>(call.value_caches) |
          static_cast<uintptr_t>(call.layer_stride | call.block_stride | call.slot_stride |
                                 call.slot_bytes)) %
             sizeof(Word) ==
         0;
}

template <class Word>
cudaError_t launch(const CompactKvCall& call, cudaStream_t stream) {
  const int64_t words = call.slot_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t parts = (words + kThreads - 1) / kThreads;
  const int64_t blocks = call.batch * call.num_layers * 2 * parts;
  if (blocks == 0 || call.num_nodes == 0) return cudaSuccess;  // an empty grid is a launch error
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Moves);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, compact_kv_kernel<Word>, call, parts);
}

}  // namespace

cudaError_t launch_compact_kv(const CompactKvCall& call, cudaStream_t stream) {
  if (fits<uint4>(call)) return launch<uint4>(call, stream);
  return fits<uint16_t>(call) ? launch<uint16_t>(call, stream) : launch<uint8_t>(call, stream);
}

}  // namespace fastspec::cuda
