"""Writes to a paged cache: new tokens, with the rotary embedding, and moves of tree nodes."""

import triton
import triton.language as tl

from fastspec_kernels.triton.float8 import float8_bits


@triton.jit
def store_kernel(
    key,  # [T, G, D]
    value,
    key_cache,  # [num_blocks, block_size, G, D]
    value_cache,
    slot_mapping,  # [T]
    cos,  # [T, R], where R > 0
    sin,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    slot_stride,
    cos_stride,
    sin_stride,
    key_scale,
    value_scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FLOAT8: tl.constexpr,  # the caches hold bytes
    INTERPRETED: tl.constexpr,
):
    """Program (token, block of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= num_slots):
        return
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    inside = (g < NUM_HEADS)[:, None] & (d < HEAD_SIZE)[None, :]
    heads = key + token * key_token_stride + g[:, None].to(tl.int64) * key_head_stride
    stored = tl.load(heads + d[None, :], mask=inside, other=0.0)
    if ROTARY_SIZE > 0:
        rotated = d < ROTARY_SIZE
        first = d < ROTARY_SIZE // 2
        partner = tl.where(first, d + ROTARY_SIZE // 2, d - ROTARY_SIZE // 2)
        other = tl.load(heads + partner[None, :], mask=inside & rotated[None, :], other=0.0)
        other = tl.where(first[None, :], -other.to(tl.float32), other.to(tl.float32))
        c = tl.load(cos + token * cos_stride + d, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + token * sin_stride + d, mask=rotated, other=0.0).to(tl.float32)
        turned = stored.to(tl.float32) * c[None, :] + other * s[None, :]
        stored = tl.where(rotated[None, :], round_to(turned, stored.dtype, INTERPRETED), stored)
    target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    place = target + g[:, None] * HEAD_SIZE + d[None, :]
    if FLOAT8:
        stored = float8_bits(tl.div_rn(stored.to(tl.float32), key_scale))
    tl.store(key_cache + place, stored, mask=inside)
    heads = value + token * value_token_stride + g[:, None].to(tl.int64) * value_head_stride
    stored = tl.load(heads + d[None, :], mask=inside, other=0.0)
    if FLOAT8:
        stored = float8_bits(tl.div_rn(stored.to(tl.float32), value_scale))
    tl.store(value_cache + place, stored, mask=inside)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert float32 x; the interpreter truncates to bfloat16, and gets its subnormals wrong."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(dtype, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=["num_blocks", "capacity"])
def compact_kernel(
    key_caches,  # [L, num_blocks, block_size, G, D]
    value_caches,
    block_table,  # [B, M]
    prefix_lens,  # [B]
    path,  # [B, N]
    accepted_len,  # [B]
    num_blocks,
    capacity,  # slots in a row of block_table
    num_nodes,
    layer_stride,
    block_stride,
    slot_stride,
    table_stride,
    path_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # G * D
    BLOCK_WIDTH: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (sequence, keys or values of a layer, columns): MOVES moves at a time.

    The moves of one round are all read before any is written. Later rounds read nodes after every
    slot written so far, because a path ascends and its i-th node is at least i + 1.
    """
    b = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    inside = n < num_nodes
    nodes = tl.load(path + b.to(tl.int64) * path_stride + n, mask=inside, other=-1)
    count = tl.min(tl.where(nodes < 0, n, BLOCK_N), 0)
    count = tl.minimum(tl.minimum(tl.load(accepted_len + b), count), num_nodes)
    prefix = tl.load(prefix_lens + b)
    caches = key_caches
    if tl.program_id(1) % 2 == 1:
        caches = value_caches
    caches += (tl.program_id(1) // 2).to(tl.int64) * layer_stride
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    table = block_table + b.to(tl.int64) * table_stride
    strides = (block_stride, slot_stride)
    for first in range(0, count, MOVES):
        move = first + tl.arange(0, MOVES)
        moving = move < count
        node = tl.load(path + b.to(tl.int64) * path_stride + move, mask=moving, other=0)
        source, readable = _slot(
            table, prefix, node, moving, num_blocks, capacity, strides, BLOCK_SIZE
        )
        target, writable = _slot(
            table, prefix, move + 1, moving, num_blocks, capacity, strides, BLOCK_SIZE
        )
        moving = readable & writable & (node != move + 1)
        mask = moving[:, None] & (column < WIDTH)[None, :]
        entry = tl.load(caches + source[:, None] + column[None, :], mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(caches + target[:, None] + column[None, :], entry, mask=mask)
        tl.debug_barrier()


@triton.jit
def _slot(table, prefix, node, wanted, num_blocks, capacity, strides, BLOCK_SIZE: tl.constexpr):
    """Offset of the entry of each node, and whether it has one."""
    position = tl.where(prefix >= 0, prefix.to(tl.int64) + node, -1)
    inside = wanted & (position >= 0) & (position < capacity)
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=-1)
    inside = inside & (block >= 0) & (block < num_blocks)
    block_stride, slot_stride = strides
    offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride
    return offset, inside
