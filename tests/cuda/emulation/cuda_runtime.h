// The part of CUDA C++ that csrc/cuda uses, for a compiler without CUDA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

static dim3& threadIdx = emulation::now.thread;
static dim3& blockIdx = emulation::now.block;
static dim3& blockDim = emulation::now.block_size;

struct uint4 {
  unsigned x, y, z, w;
};

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
struct cudaFuncAttributes {
  int ptxVersion, binaryVersion;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = emulation::now.device;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 227 * 1024;
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  emulation::allow_shared_bytes(kernel, static_cast<size_t>(bytes));
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {90, 90};
  return cudaSuccess;
}

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args... args) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& found = config->attrs[i];
    if (found.id == cudaLaunchAttributeClusterDimension) cluster = found.val.clusterDim.x;
  }
  emulation::check_shared_bytes(reinterpret_cast<const void*>(kernel), config->dynamicSmemBytes);
  emulation::run(config->gridDim.x, cluster, config->blockDim.x, config->dynamicSmemBytes,
                 [=] { kernel(args...); });
  return cudaSuccess;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline unsigned long long __float2ull_rz(float value) {
  if (value != value) return 1ull << 63;
  if (value <= 0.0f) return 0;
  return value >= 0x1p64f ? ~0ull : static_cast<unsigned long long>(value);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <class T>
T __ldg(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) __builtin_trap();
  return *address;
}

template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

inline unsigned atomicOr(unsigned* address, unsigned bits) {
  const unsigned before = *address;
  *address = before | bits;
  return before;
}

inline void __syncthreads() { emulation::wait_for_block(); }
inline void __cluster_barrier_arrive() {}
inline void __cluster_barrier_wait() { emulation::wait_for_cluster(); }
inline void* __cluster_map_shared_rank(const void* here, unsigned rank) {
  return emulation::of_block(here, rank);
}

namespace emulation {

template <class T>
T take(const char* operation, unsigned lanes, T value, int source) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  const uint64_t* words = exchange(operation, lanes, word);
  const int own = static_cast<int>(now.thread.x % 32);
  std::memcpy(&value, words + (source >= 0 && source < 32 ? source : own), sizeof(value));
  return value;
}

}  // namespace emulation

template <class T>
T __shfl_sync(unsigned lanes, T value, int source) {
  return emulation::take("__shfl_sync", lanes, value, source % 32);
}
template <class T>
T __shfl_up_sync(unsigned lanes, T value, unsigned step) {
  return emulation::take("__shfl_up_sync", lanes, value, int(threadIdx.x % 32) - int(step));
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  return emulation::take("__shfl_xor_sync", lanes, value, int(threadIdx.x % 32) ^ mask);
}
inline unsigned __ballot_sync(unsigned lanes, bool vote) {
  const uint64_t* votes = emulation::exchange("__ballot_sync", lanes, vote);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(votes[lane]) << lane;
  return bits;
}
