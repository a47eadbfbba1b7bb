#include <cuda_runtime.h>

#include "common/philox.h"
#include "cuda/launch.h"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 256;

// One thread draws one number; no shared memory, 4 bytes written per thread.
__global__ void uniform_kernel(const int64_t* seed, const int64_t* position, float* samples,
                               int64_t total, int64_t num, uint32_t stream_id) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < total) {
    const int64_t row = i / num;
    samples[i] = philox_uniform(seed[row], position[row], stream_id, i - row * num);
  }
}

}  // namespace

cudaError_t launch_uniform(const int64_t* seed, const int64_t* position, float* samples,
                           int64_t batch, int64_t num, uint32_t stream_id, cudaStream_t stream) {
  const int64_t total = batch * num;
  if (total == 0) {
    return cudaSuccess;  // an empty grid is a launch error
  }
  const auto blocks = static_cast<unsigned>((total + kThreads - 1) / kThreads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, uniform_kernel, seed, position, samples, total, num,
                            stream_id);
}

}  // namespace fastspec::cuda
