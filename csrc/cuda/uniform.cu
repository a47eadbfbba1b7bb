#include <cuda_runtime.h>

#include "common/philox.h"
#include "cuda/launch.h"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // numbers of one Philox block

// One thread draws the numbers of one Philox block; no shared memory.
__global__ void __launch_bounds__(kThreads)
    uniform_kernel(const int64_t* seed, const int64_t* position, float* samples, int64_t batch,
                   int64_t num, uint32_t stream_id) {
  const int64_t blocks = (num + kWords - 1) / kWords;  // of a row
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= batch * blocks) return;
  const int64_t row = i / blocks, block = i - row * blocks;
  const uint64_t at = static_cast<uint64_t>(position[row]);
  const uint32_t counter[4] = {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32),
                               static_cast<uint32_t>(block), stream_id};
  const PhiloxBlock words = philox4x32_10(static_cast<uint64_t>(seed[row]), counter);
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const int64_t index = block * kWords + j;
    if (index < num) samples[row * num + index] = static_cast<float>(words.word[j] >> 8) * 0x1p-24f;
  }
}

}  // namespace

cudaError_t launch_uniform(const int64_t* seed, const int64_t* position, float* samples,
                           int64_t batch, int64_t num, uint32_t stream_id, cudaStream_t stream) {
  const int64_t total = batch * ((num + kWords - 1) / kWords);
  if (total == 0) return cudaSuccess;  // an empty grid is a launch error
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((total + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, uniform_kernel, seed, position, samples, batch, num,
                            stream_id);
}

}  // namespace fastspec::cuda
