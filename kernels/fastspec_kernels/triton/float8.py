"""8-bit floats of a cache, e4m3: conversion from float32, rounding to nearest even, and back."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
NOT_A_NUMBER = tl.constexpr(0x7F)


@triton.jit
def float8_bits(x):
    """The byte that stores float32 x, clamped to the largest number."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = tl.minimum(tl.abs(x), LARGEST)
    clamped = size.to(tl.int32, bitcast=True)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - 960  # biases: (127 - 7) << 3
    # 2^14 + size is a multiple of 2^-9, like the numbers below 2^-6.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(magnitude > 0x7F800000, NOT_A_NUMBER, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float8_values(stored):
    """The float32 value of each byte, if the GPU has no instruction for it."""
    code = stored.to(tl.int32)
    magnitude = code & 0x7F
    bits = ((code & 0x80) << 24) | (magnitude << 20)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
    return tl.where(magnitude == NOT_A_NUMBER, float("nan"), value)


@triton.jit
def cached_values(stored, V: tl.constexpr):
    """Convert stored values of a cache to the type that is multiplied."""
    if V.float8 == "native":
        values = stored.to(tl.float8e4nv, bitcast=True)
    elif V.float8 == "bits":
        values = float8_values(stored)
    else:
        values = stored
    return values.to(V.dot_dtype)
