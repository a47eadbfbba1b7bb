"""Launches of the kernels that write to a paged cache."""

import torch
import triton
from torch import Tensor

from fastspec_kernels.triton.cache_kernels import compact_kernel, store_kernel
from fastspec_kernels.triton.launch import launch

MOVES = 8  # entries that a program of compact_kv moves at once


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> None:
    """One launch."""
    num_tokens, num_heads, head_size = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    block_d = triton.next_power_of_2(head_size)
    block_g = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d))
    cos_rows, sin_rows = (key, key) if cos is None or sin is None else (cos, sin)
    launch(
        store_kernel,
        (num_tokens, triton.cdiv(num_heads, block_g)),
        key,
        value,
        numbers_or_bytes(key_cache),
        numbers_or_bytes(value_cache),
        slot_mapping,
        cos_rows,
        sin_rows,
        num_blocks * block_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        cos_rows.stride(0),
        sin_rows.stride(0),
        float(key_scale),
        float(value_scale),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        ROTARY_SIZE=0 if cos is None else cos.shape[1],
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        FLOAT8=key_cache.dtype == torch.float8_e4m3fn,
        INTERPRETED=key.device.type == "cpu",
        num_warps=4,
    )


def compact_kv(
    key_caches: Tensor,
    value_caches: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    path: Tensor,
    accepted_len: Tensor,
) -> None:
    """One launch for all layers."""
    num_layers, num_blocks, block_size, num_heads, head_size = key_caches.shape
    batch, num_nodes = path.shape
    if 0 in (num_layers, num_blocks, batch, num_nodes):
        return
    width = num_heads * head_size
    block_width = min(triton.next_power_of_2(width), 1024)
    launch(
        compact_kernel,
        (batch, 2 * num_layers, triton.cdiv(width, block_width)),
        numbers_or_bytes(key_caches),
        numbers_or_bytes(value_caches),
        block_table,
        prefix_lens,
        path,
        accepted_len,
        num_blocks,
        block_table.shape[1] * block_size,
        num_nodes,
        key_caches.stride(0),
        key_caches.stride(1),
        key_caches.stride(2),
        block_table.stride(0),
        path.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=width,
        BLOCK_WIDTH=block_width,
        MOVES=MOVES,
        BLOCK_N=triton.next_power_of_2(num_nodes),
        num_warps=4,
    )


def numbers_or_bytes(cache: Tensor) -> Tensor:
    """Return the cache as kernels read it: float8 as bytes, because some GPUs lack the type."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
