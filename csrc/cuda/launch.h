// The launchers of the CUDA kernels: raw device pointers and a stream, no framework.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fastspec::cuda {

// samples[b, i] = number i of (seed[b], position[b], stream_id); samples is [batch, num],
// contiguous.
cudaError_t launch_uniform(const int64_t* seed, const int64_t* position, float* samples,
                           int64_t batch, int64_t num, uint32_t stream_id, cudaStream_t stream);

}  // namespace fastspec::cuda
