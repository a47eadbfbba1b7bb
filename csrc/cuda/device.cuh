// The machine as the kernels see it: vectors of logits, exact conversions, fixed-point weights.
#pragma once
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/half.h"
#include "cuda/launch.h"

namespace fastspec::cuda {

using u64 = unsigned long long;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kWeightOne = 0x1p44f;  // the weight of the best logit of a row, see kMaxVocab
constexpr float kMassOne = 0x1p60f;    // the mass of a whole distribution

__device__ __forceinline__ unsigned char* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
#else
  return emulation::dynamic_shared();
#endif
}

// 2^x to about 2 units in the last place; 2^-inf = 0. Weights below 2^-44 are dropped anyway, so
// flushing denormal results to zero changes nothing.
__device__ __forceinline__ float exp2_approx(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// The larger value, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<uint16_t>(bits)));
  return y;
#else
  return float16_to_float(static_cast<uint16_t>(bits));
#endif
}

__device__ __forceinline__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ __forceinline__ int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ u64 to_fixed(float value, float one) {
  return __float2ull_rz(value * one);
}

// A share in units of 2^-64, clamped to [0, 1).
__device__ __forceinline__ u64 fixed_share(float share) {
  return __float2ull_rz(fminf(fmaxf(share, 0.0f), 0x1.fffffep-1f) * 0x1p64f);
}

__device__ __forceinline__ u64 share_rounded_down(float share, u64 total) {
  return __umul64hi(fixed_share(share), total);
}

// At least 1, however small the share.
__device__ __forceinline__ u64 share_rounded_up(float share, u64 total) {
  const u64 fixed = fixed_share(share);
  return __umul64hi(fixed, total) + (fixed == 0 || fixed * total != 0);
}

// Integers in the order of the floats; both zeros map to the same one.
__device__ __forceinline__ uint32_t to_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

constexpr int kUnit = 8;  // logits that a lane processes at a time

__device__ __forceinline__ bool is_wide(Element element) { return element == Element::kFloat32; }

__device__ __forceinline__ float widen(uint32_t bits, Element element) {
  if (is_wide(element)) return __uint_as_float(bits);
  return element == Element::kBFloat16 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

// The bits of a value, rounded to nearest even.
__device__ __forceinline__ uint32_t narrow(float value, Element element) {
  if (is_wide(element)) return __float_as_uint(value);
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  if (element == Element::kBFloat16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  return bits;
#else
  return element == Element::kBFloat16 ? bfloat16_from_float(value) : float16_from_float(value);
#endif
}

// The logits of one unit as stored in memory; 16-bit formats leave the second half unused.
struct Raw {
  uint4 low, high;

  __device__ __forceinline__ void unpack(Element element, float (&x)[kUnit]) const {
    const uint32_t words[kUnit] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (is_wide(element)) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[j] = __uint_as_float(words[j]);
    } else if (element == Element::kBFloat16) {
#pragma unroll
      for (int j = 0; j < kUnit; j += 2) {
        x[j] = __uint_as_float(words[j / 2] << 16);
        x[j + 1] = __uint_as_float(words[j / 2] & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; j += 2) {
        x[j] = half_to_float(words[j / 2] & 0xffffu);
        x[j + 1] = half_to_float(words[j / 2] >> 16);
      }
    }
  }
};

// A complete unit in memory, at a multiple of 16 bytes.
__device__ __forceinline__ Raw load_unit(const void* address, bool wide) {
  const uint4* parts = static_cast<const uint4*>(address);
  Raw raw;
  raw.low = __ldg(parts);
  raw.high = wide ? __ldg(parts + 1) : raw.low;
  return raw;
}

}  // namespace fastspec::cuda
