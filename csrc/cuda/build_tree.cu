#include "cuda/device.cuh"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 128;

// The parent of a node other than the root, or -1 if that is not an earlier node.
__device__ int64_t parent_of(const int32_t* parents, int64_t node) {
  const int64_t parent = __ldg(parents + node);
  return parent >= 0 && parent < node ? parent : -1;
}

// One thread per node follows the parents to the root, once for the depth and once for the bits.
__global__ void __launch_bounds__(kThreads) build_tree_kernel(const BuildTreeCall call) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= call.batch * call.num_nodes) return;
  const int64_t own = index % call.num_nodes;
  const int32_t* parents = call.parents + (index - own);
  int64_t node = own;
  int32_t depth = 0;
  for (; node > 0; node = parent_of(parents, node)) ++depth;
  const bool present = node == 0;
  call.depths[index] = present ? depth : -1;

  const int64_t words = (call.num_nodes + 63) / 64;
  int64_t* mask = call.ancestor_mask + index * words;
  node = present ? own : -1;
  for (int64_t word = words - 1; word >= 0; --word) {
    u64 bits = 0;
    while (node >= word * 64) {  // ancestors come in descending order
      bits |= u64{1} << (node % 64);
      node = node > 0 ? parent_of(parents, node) : -1;
    }
    mask[word] = static_cast<int64_t>(bits);
  }
}

}  // namespace

cudaError_t launch_build_tree(const BuildTreeCall& call, cudaStream_t stream) {
  const int64_t total = call.batch * call.num_nodes;
  if (total == 0) return cudaSuccess;  // an empty grid is a launch error
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((total + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, build_tree_kernel, call);
}

}  // namespace fastspec::cuda
