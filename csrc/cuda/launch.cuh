// Launches of kernels whose blocks work in teams.
#pragma once
#include <atomic>

#include "cuda/plan.h"
#include "cuda/team.cuh"

namespace fastspec::cuda {

static_assert(sizeof(TeamMemory) <= kFixedSharedBytes);
static_assert(sizeof(TeamMemory) % sizeof(uint4) == 0);

template <class... Params>
cudaError_t image_of(void (*kernel)(Params...), Image* image) {
  cudaFuncAttributes found = {};
  const cudaError_t error = cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel));
  *image = {found.ptxVersion, found.binaryVersion};
  return error;
}

// Lets the blocks of a kernel have all the shared memory of the current device: once for each, and
// never less, as another thread may be about to launch.
template <auto kKernel>
cudaError_t allow_all_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // a bit per device
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (error != cudaSuccess || (allowed.load(std::memory_order_acquire) & bit) != 0) return error;
  error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

// Starts `teams` clusters of plan.cluster blocks with room for a row each if plan.staged. With
// kWaits the kernel itself waits for the one in front of it, and may start early.
template <auto kStaged, auto kPlain, bool kWaits = false, class Call>
cudaError_t launch_teams(int64_t teams, const Plan& plan, const RowShape& row, cudaStream_t stream,
                         const Call& call) {
  if (teams == 0) return cudaSuccess;  // an empty grid is a launch error
  int64_t shared = sizeof(TeamMemory);
  if (plan.staged) {
    shared += staged_bytes(row, plan.cluster, plan.threads);
    const cudaError_t error = allow_all_shared_memory<kStaged>();
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(teams * plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  if (plan.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = plan.cluster;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (kWaits && plan.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, plan.staged ? kStaged : kPlain, call, plan.cluster);
}

}  // namespace fastspec::cuda
