"""Philox4x32-10, one number per lane."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.launch import launch

BLOCK = 256


def uniform(seed: Tensor, position: Tensor, num: int, stream: int) -> Tensor:
    """1 launch."""
    batch = seed.shape[0]
    samples = torch.empty((batch, num), dtype=torch.float32, device=seed.device)
    # Triton would treat a number above 2**31 as a 64-bit one.
    stream = stream - 2**32 if stream >= 2**31 else stream
    blocks = -(-num // BLOCK)
    launch(
        uniform_kernel,
        batch * blocks,
        seed,
        position,
        samples,
        num,
        stream,
        blocks,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return samples


@triton.jit
def uniform_kernel(seed, position, samples, num, stream, blocks, BLOCK: tl.constexpr):
    """One program per row and block of numbers."""
    b = tl.program_id(0) // blocks
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(seed + b)
    counter = tl.load(position + b)
    zero = tl.zeros([BLOCK], tl.uint32)
    c0 = zero + counter.to(tl.uint32)
    c1 = zero + (counter >> 32).to(tl.uint32)
    c2 = (index // 4).to(tl.uint32)
    c3 = zero + (tl.full([], 0, tl.int32) + stream).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    lane = index % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    value = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    tl.store(samples + b.to(tl.int64) * num + index, value, mask=index < num)
