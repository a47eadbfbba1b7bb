"""The parts between the matrix products of a decoder layer, in float32 and rounded once."""

import triton
import triton.language as tl

from fastspec_kernels.triton.attention_softmax import LOG2_E
from fastspec_kernels.triton.cache_kernels import round_to

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def norm_kernel(
    hidden,  # [T, E] f32
    added,  # [T, E] or None
    added_norm,  # [E] or None
    norm,  # [E] or None
    total,  # [T, E] f32, where there is `added`
    rows,  # [T, E], where there is `norm`
    size,
    eps,
    shift,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (row): add, then normalise; see `_add_and_norm`."""
    start = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(hidden + start + place, mask=inside, other=0.0)
    if added is not None:
        more = tl.load(added + start + place, mask=inside, other=0.0).to(tl.float32)
        if added_norm is not None:
            more = _normed(more, added_norm, place, size, eps, shift, inside)
        x += more
        tl.store(total + start + place, x, mask=inside)
    if norm is not None:
        x = _normed(x, norm, place, size, eps, shift, inside)
        tl.store(rows + start + place, round_to(x, rows.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def _normed(x, weight, place, size, eps, shift, inside):
    """Values [N], 0 beyond `size`, over their root mean square, times the shifted weights."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) + shift
    return x * scale * factor


@triton.jit
def heads_kernel(
    query,  # [T, H, D], rows apart by query_stride
    key,  # [T, G, D]
    value,
    out,  # [T, H, D]
    key_cache,  # [num_blocks, block_size, G, D]
    value_cache,
    slot_mapping,  # [T]
    cos,  # [T, R] f32, where R > 0
    sin,
    query_norm,  # [D] or None
    key_norm,
    query_stride,
    key_stride,
    value_stride,
    num_slots,
    block_stride,
    slot_stride,
    cos_stride,
    sin_stride,
    eps,
    shift,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (token, head): heads of the queries, then of the keys, then of the values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_SIZE
    factors = cos + token * cos_stride, sin + token * sin_stride
    if head < NUM_HEADS:
        query += token * query_stride + head * HEAD_SIZE
        x = _turned(query, query_norm, factors, eps, shift, HEAD_SIZE, ROTARY_SIZE, BLOCK_D)
        place = (token * NUM_HEADS + head) * HEAD_SIZE
        tl.store(out + place + d, round_to(x, out.dtype.element_ty, INTERPRETED), mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        target += kv_head * HEAD_SIZE
        stored = d < tl.where((slot >= 0) & (slot < num_slots), HEAD_SIZE, 0)
        if head < NUM_HEADS + NUM_KV_HEADS:
            key += token * key_stride + kv_head * HEAD_SIZE
            x = _turned(key, key_norm, factors, eps, shift, HEAD_SIZE, ROTARY_SIZE, BLOCK_D)
            rounded = round_to(x, key_cache.dtype.element_ty, INTERPRETED)
            tl.store(key_cache + target + d, rounded, mask=stored)
        else:
            value += token * value_stride + kv_head * HEAD_SIZE
            copied = tl.load(value + d, mask=inside, other=0.0)
            tl.store(value_cache + target + d, copied, mask=stored)


@triton.jit
def _turned(
    head,
    norm,
    factors,
    eps,
    shift,
    HEAD_SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head [D], normalised if there is a norm, its first R numbers rotated."""
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_SIZE
    x = tl.load(head + d, mask=inside, other=0.0).to(tl.float32)
    first = d < ROTARY_SIZE // 2
    partner = tl.where(first, d + ROTARY_SIZE // 2, d - ROTARY_SIZE // 2)
    rotated = d < ROTARY_SIZE
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD_SIZE + eps)
        x *= scale * (tl.load(norm + d, mask=inside, other=0.0).to(tl.float32) + shift)
    if ROTARY_SIZE > 0:
        other = tl.load(head + partner, mask=rotated, other=0.0).to(tl.float32)
        if norm is not None:
            weight = tl.load(norm + partner, mask=rotated, other=0.0).to(tl.float32)
            other *= scale * (weight + shift)
        other = tl.where(first, -other, other)
        c = tl.load(factors[0] + d, mask=rotated, other=1.0)
        s = tl.load(factors[1] + d, mask=rotated, other=0.0)
        x = tl.where(rotated, x * c + other * s, x)
    return x


@triton.jit
def gate_kernel(
    gate,  # [T, N], rows apart by row_stride
    up,
    size,
    row_stride,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (row, block): replace gate by activation(gate) * up."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    place = tl.program_id(0).to(tl.int64) * row_stride + n
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    active = activated(x, SILU) * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + place, round_to(active, gate.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def activated(x, SILU: tl.constexpr):
    """silu(x), or gelu(x) with tanh."""
    y = x
    if not SILU:  # (1 + tanh(y)) / 2 is the sigmoid of 2y
        y = 2.0 * SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(-y * LOG2_E))
