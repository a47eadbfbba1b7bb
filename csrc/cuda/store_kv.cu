#include <algorithm>

#include "cuda/device.cuh"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 256;  // maximum; 16 bytes each cover a token of 8 heads of 128
constexpr int kBlocks =
    3;  // per multiprocessor; allows 80 registers, as ptxas might use 64 and spill

// What a thread moves at a time: one value, at any address.
struct One {
  static constexpr int kValues = 1;
  uint32_t bits;

  static __device__ __forceinline__ One load(const char* from, int64_t index, Element element) {
    if (is_wide(element)) return {__ldg(reinterpret_cast<const uint32_t*>(from) + index)};
    return {__ldg(reinterpret_cast<const uint16_t*>(from) + index)};
  }

  static __device__ __forceinline__ One pack(const float (&x)[kValues], Element element) {
    return {narrow(x[0], element)};
  }

  __device__ __forceinline__ void unpack(Element element, float (&x)[kValues]) const {
    x[0] = widen(bits, element);
  }

  __device__ __forceinline__ void store(char* to, int64_t index, Element element) const {
    if (is_wide(element)) {
      reinterpret_cast<uint32_t*>(to)[index] = bits;
    } else {
      reinterpret_cast<uint16_t*>(to)[index] = static_cast<uint16_t>(bits);
    }
  }
};

// Eight values at a multiple of 16 bytes.
struct Eight {
  static constexpr int kValues = kUnit;
  Raw raw;

  static __device__ __forceinline__ const char* at(const char* from, int64_t index,
                                                   Element element) {
    return from + index * (is_wide(element) ? 32 : 16);
  }

  static __device__ __forceinline__ Eight load(const char* from, int64_t index, Element element) {
    return {load_unit(at(from, index, element), is_wide(element))};
  }

  static __device__ __forceinline__ Eight pack(const float (&x)[kValues], Element element) {
    uint32_t bits[kValues];
#pragma unroll
    for (int j = 0; j < kValues; ++j) bits[j] = narrow(x[j], element);
    if (is_wide(element)) {
      return {{{bits[0], bits[1], bits[2], bits[3]}, {bits[4], bits[5], bits[6], bits[7]}}};
    }
    const uint4 low = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                       bits[6] | bits[7] << 16};
    return {{low, low}};
  }

  __device__ __forceinline__ void unpack(Element element, float (&x)[kValues]) const {
    raw.unpack(element, x);
  }

  __device__ __forceinline__ void store(char* to, int64_t index, Element element) const {
    uint4* parts = reinterpret_cast<uint4*>(const_cast<char*>(at(to, index, element)));
    parts[0] = raw.low;
    if (is_wide(element)) parts[1] = raw.high;
  }
};

// One head of one token, and its place in the cache.
struct Head {
  const char* from;
  char* to;
};

// The two halves of `pair`; each product and each sum is rounded, as in torch.
template <class Unit>
__device__ __forceinline__ void rotate(const StoreKvCall& call, const Head& head, int64_t token,
                                       int64_t pair, int64_t pairs) {
  constexpr int kValues = Unit::kValues;
  const Rotation& rotation = call.rotation;
  const char* cos = rotation.cos + token * rotation.cos_stride;
  const char* sin = rotation.sin + token * rotation.sin_stride;
  float x[2][kValues], c[2][kValues], s[2][kValues], turned[2][kValues];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t index = pair + half * pairs;
    Unit::load(head.from, index, call.element).unpack(call.element, x[half]);
    Unit::load(cos, index, rotation.element).unpack(rotation.element, c[half]);
    Unit::load(sin, index, rotation.element).unpack(rotation.element, s[half]);
  }
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    turned[0][j] = __fsub_rn(__fmul_rn(x[0][j], c[0][j]), __fmul_rn(x[1][j], s[0][j]));
    turned[1][j] = __fadd_rn(__fmul_rn(x[1][j], c[1][j]), __fmul_rn(x[0][j], s[1][j]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Unit::pack(turned[half], call.element).store(head.to, pair + half * pairs, call.element);
  }
}

// One block per token: its key units, rotated ones in pairs, then its value units.
template <class Unit>
__global__ void __launch_bounds__(kThreads, kBlocks) store_kv_kernel(const StoreKvCall call) {
  const int64_t token = blockIdx.x;
  const int64_t slot = __ldg(call.slot_mapping + token);
  if (slot < 0 || slot >= call.num_slots) return;
  const int64_t block = slot / call.block_size;
  const int64_t place =
      block * call.block_stride + (slot - block * call.block_size) * call.slot_stride;
  const int64_t head_bytes = call.head_size * (is_wide(call.element) ? 4 : 2);
  const uint32_t units = static_cast<uint32_t>(call.head_size / Unit::kValues);
  const uint32_t pairs = static_cast<uint32_t>(call.rotation.size / (2 * Unit::kValues));
  const uint32_t num_heads = static_cast<uint32_t>(call.num_heads);
  const uint32_t key_items = num_heads * (units - pairs);
  for (uint32_t i = threadIdx.x; i < key_items + num_heads * units; i += blockDim.x) {
    const bool is_key = i < key_items;
    const uint32_t item = is_key ? i : i - key_items, per_head = is_key ? units - pairs : units;
    const uint32_t number = item / per_head, unit = item - number * per_head;
    const StoreSide& side = is_key ? call.key : call.value;
    const Head head = {side.from + token * side.token_stride + number * side.head_stride,
                       side.cache + place + number * head_bytes};
    if (is_key && unit < pairs) {
      rotate<Unit>(call, head, token, unit, pairs);
    } else {
      const int64_t index = is_key ? unit + pairs : unit;
      Unit::load(head.from, index, call.element).store(head.to, index, call.element);
    }
  }
}

bool is_aligned(const StoreSide& side) {
  return (reinterpret_cast<uintptr_t>(side.from) | reinterpret_cast<uintptr_t>(side.cache) |
          static_cast<uintptr_t>(side.token_stride | side.head_stride)) %
             sizeof(uint4) ==
         0;
}

// Whether each group of eight values is at a multiple of 16 bytes.
bool fits_eight(const StoreKvCall& call) {
  const Rotation& rotation = call.rotation;
  return is_aligned(call.key) && is_aligned(call.value) &&
         (call.block_stride | call.slot_stride) % sizeof(uint4) == 0 && call.head_size % 8 == 0 &&
         rotation.size % 16 == 0 &&
         (reinterpret_cast<uintptr_t>(rotation.cos) | reinterpret_cast<uintptr_t>(rotation.sin) |
          static_cast<uintptr_t>(rotation.cos_stride | rotation.sin_stride)) %
                 sizeof(uint4) ==
             0;
}

template <class Unit>
cudaError_t launch(const StoreKvCall& call, cudaStream_t stream) {
  const int64_t items =
      call.num_heads * (2 * call.head_size - call.rotation.size / 2) / Unit::kValues;
  const int64_t warps = (items + kWarp - 1) / kWarp;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.num_tokens));
  config.blockDim = dim3(static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kThreads)));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, store_kv_kernel<Unit>, call);
}

}  // namespace

cudaError_t launch_store_kv(const StoreKvCall& call, cudaStream_t stream) {
  if (call.num_tokens == 0) return cudaSuccess;  // an empty grid is a launch error
  return fits_eight(call) ? launch<Eight>(call, stream) : launch<One>(call, stream);
}

}  // namespace fastspec::cuda
