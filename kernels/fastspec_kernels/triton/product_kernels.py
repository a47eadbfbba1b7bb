"""Products of a few rows with matrices, each of which is read once."""

import triton
import triton.language as tl

from fastspec_kernels.triton.cache_kernels import round_to
from fastspec_kernels.triton.decoder_kernels import activated


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows,  # [T, K], T <= BLOCK_T
    weights,  # one to three [N_i, K]
    biases,  # as many [N_i], or none
    outs,  # as many [T, N_i]
    sizes,  # as many N_i
    num_rows,
    depth,
    SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (block of outputs): the blocks of the first matrix, then those of the next.

    Each warp sums a slice of the inputs, because a warp's products wait for each other and one
    chain would not keep up with memory.
    """
    block = tl.program_id(0)
    weight, out, size = weights[0], outs[0], sizes[0]
    if len(biases) > 0:
        bias = biases[0]
    for i in tl.static_range(1, len(weights)):
        passed = tl.cdiv(size, BLOCK_N)
        if block >= passed:
            block -= passed
            weight, out, size = weights[i], outs[i], sizes[i]
            if len(biases) > 0:
                bias = biases[i]
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    slices = tl.arange(0, SLICES)[:, None] * BLOCK_K + k[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    starts = t[None, None, :].to(tl.int64) * depth
    weight_starts = n[None, :, None].to(tl.int64) * depth
    for first in range(0, depth, SLICES * BLOCK_K):
        place = first + slices
        within = place < depth
        loaded = within[:, :, None] & (t < num_rows)[None, None, :]
        x = tl.load(rows + starts + place[:, :, None], mask=loaded, other=0.0)
        loaded = within[:, None, :] & (n < size)[None, :, None]
        w = tl.load(weight + weight_starts + place[:, None, :], mask=loaded, other=0.0)
        total = _dot(w, x, total, INTERPRETED)
    result = tl.sum(total, 0)
    if len(biases) > 0:
        result += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    target = out + t[None, :].to(tl.int64) * size + n[:, None]
    stored = (n < size)[:, None] & (t < num_rows)[None, :]
    tl.store(target, round_to(result, out.dtype.element_ty, INTERPRETED), mask=stored)


@triton.jit(do_not_specialize=["num_rows"])
def gated_kernel(
    rows,  # [T, K], T <= BLOCK_T
    gate_weight,  # [N, K]
    up_weight,  # [N, K]
    out,  # [T, N]
    num_rows,
    depth,
    size,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (block of outputs): activation(rows @ gate_weight.T) * (rows @ up_weight.T)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    starts = t[:, None].to(tl.int64) * depth
    weight_starts = n[None, :].to(tl.int64) * depth
    for first in range(0, depth, BLOCK_K):
        place = first + k
        within = place < depth
        loaded = (t < num_rows)[:, None] & within[None, :]
        x = tl.load(rows + starts + place[None, :], mask=loaded, other=0.0)
        source, loaded = weight_starts + place[:, None], within[:, None] & (n < size)[None, :]
        w = tl.load(gate_weight + source, mask=loaded, other=0.0)
        v = tl.load(up_weight + source, mask=loaded, other=0.0)
        gate = _dot(x, w, gate, INTERPRETED)
        up = _dot(x, v, up, INTERPRETED)
    target = out + t[:, None].to(tl.int64) * size + n[None, :]
    stored = (t < num_rows)[:, None] & (n < size)[None, :]
    result = activated(gate, SILU) * up
    tl.store(target, round_to(result, out.dtype.element_ty, INTERPRETED), mask=stored)


@triton.jit
def _dot(x, y, total, INTERPRETED: tl.constexpr):
    """Add x @ y; the interpreter multiplies no bfloat16."""
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total)
