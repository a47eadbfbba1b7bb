// Activations of gated products.
#pragma once
#include "lanes.h"
#include "linear.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// 1 / x within 1 ulp for normal numbers up to 2^126.
FASTSPEC_INLINE NativeF32 reciprocal(NativeF32 x) {
#if defined(__AVX512F__)
  const NativeF32 y = _mm512_rcp14_ps(x);
  return multiply_add(y, multiply_add(-x, y, native(1.0f)), y);
#else
  return 1.0f / x;
#endif
}

// x / (1 + e^-x); below -87, where this is below 1e-35, x * 0: -0, or NaN if x is -inf.
FASTSPEC_INLINE NativeF32 silu(NativeF32 x) {
  constexpr float kMost = 126.0f;
  const NativeF32 power = x * -kLog2E;
  const NativeF32 bounded = power > kMost ? native(kMost) : power;
  return power > kMost ? x * 0.0f : x * reciprocal(1.0f + exp2(bounded));
}

FASTSPEC_INLINE NativeF32 gelu_tanh(NativeF32 x) {
  constexpr float kSqrt2OverPi = 0.7978845608f;
  const NativeF32 inner = kSqrt2OverPi * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// Calls f with the function of an activation.
template <class F>
FASTSPEC_INLINE void with_activation(Activation activation, const F& f) {
  if (activation == Activation::kSilu) {
    f([](NativeF32 x) FASTSPEC_INLINE_LAMBDA { return silu(x); });
  } else {
    f([](NativeF32 x) FASTSPEC_INLINE_LAMBDA { return gelu_tanh(x); });
  }
}

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
