// Launches of kernels whose blocks work in teams.
#pragma once
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

// Starts `teams` clusters of plan.cluster blocks with room for a row each if plan.staged.
template <class... Params>
cudaError_t launch_teams(void (*kernel)(Params...), int64_t teams, const Plan& plan,
                         const RowShape& row, cudaStream_t stream, Params... args) {
  if (teams == 0) return cudaSuccess;  // an empty grid is a launch error
  const int64_t stage = plan.staged ? staged_bytes(row, plan.cluster, plan.threads) : 0;
  const int64_t shared = static_cast<int64_t>(sizeof(TeamMemory)) + stage;
  constexpr int64_t kWithoutAsking = 48 * 1024;
  if (shared > kWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = plan.cluster;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(teams * plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace fastspec::cuda
