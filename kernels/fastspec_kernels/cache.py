"""Writes to the block-paged KV cache."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    check_caches,
    check_dense,
    check_dense_rows,
    check_scales,
    dtypes_beside,
)

_INDEX = (torch.int32,)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    backend: str = "auto",
) -> None:
    """Write the keys and values of new tokens into their cache slots, in place.

    Slot s is row s % block_size of block s // block_size; token t goes to slot_mapping[t], and -1
    skips it. Two tokens must not share a slot, and key, value and the caches must not share memory.

    With cos and sin, the first R values of every key head are rotated first, in float32: value i of
    the first half becomes key[i] * cos[i] - key[i + R / 2] * sin[i], value i of the second half
    key[i] * cos[i] + key[i - R / 2] * sin[i], as in transformers' models. The rotated key is
    rounded to the dtype of key.

    A float8 cache stores key / key_scale and value / value_scale, both rounded to nearest even;
    values beyond its largest number, 448, are clamped to it, and NaN stays NaN.

    Args:
        key: [T, G, D] float32, bfloat16 or float16, last dimension contiguous, any other strides.
        value: [T, G, D], as key.
        key_cache: [num_blocks, block_size, G, D], dtype of key or float8_e4m3fn, last two
            dimensions contiguous.
        value_cache: as key_cache, with the same strides.
        slot_mapping: [T] int64, contiguous.
        cos: [T, R] float32 or dtype of key, R even and <= D, last dimension contiguous.
        sin: as cos; pass both or neither.
        key_scale: the key value that a stored 1 represents; 1.0 unless the cache is float8.
        value_scale: as key_scale, for values.
        backend: "auto", "cpu", "cuda", "triton" or "reference"; float8 needs one of the last two.
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this; for
            tensors on the CPU also a slot outside the cache, before anything is written.

    Compiled kernels do not synchronise with the host. All other slots keep their bits. Source of
    the rotation: Su et al., 2104.09864.
    """
    key_scale, value_scale = check_scales(key_cache, key_scale, value_scale)
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    options = (cos, sin, key_scale, value_scale)

    def check():
        _check_tensors(*tensors)
        dtypes = (torch.float32, key.dtype)
        check_rotation(cos, sin, key.shape[0], key.shape[2], dtypes, key.device)
        check_slots(slot_mapping, key_cache)

    run_checked("store_kv", backend, key_cache, (*tensors, *options), check)


def compact_kv(
    key_caches: Tensor,
    value_caches: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    path: Tensor,
    accepted_len: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Move the accepted nodes of each token tree to their places in the text, in all layers.

    Before, node j of tree b is at place prefix_lens[b] + j of its context, the root being node 0.
    After, the i-th node of its path is at place prefix_lens[b] + 1 + i for i < accepted_len[b], as
    if all were read before any is written, and every other slot keeps its bits. Entries after the
    accepted tokens are stale and may be overwritten: rollback is only a shorter context length.
    The caches must not share memory.

    Args:
        key_caches: [L, num_blocks, block_size, G, D] float32, bfloat16, float16 or float8_e4m3fn,
            last two dimensions contiguous.
        value_caches: as key_caches, with the same strides.
        block_table: [B, M] int32, rows contiguous; sequences must not share blocks that contain
            places after their prefix_lens.
        prefix_lens: [B] int32, contiguous, tokens of each sequence before the root.
        path: [B, N] int32, rows contiguous: ascending nodes after the root, as returned by
            `verify_tree`; a negative one ends the path.
        accepted_len: [B] int32, contiguous, at most N; a sequence with 0 or less is left unchanged.
        backend: "auto", "cpu", "cuda", "triton" or "reference".
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this; for
            tensors on the CPU also places outside the table or blocks outside the cache, before
            anything is written. Elsewhere such moves are skipped.

    One launch for all layers. Compiled kernels do not synchronise with the host; safe in CUDA
    graphs.
    """
    tensors = (key_caches, value_caches, block_table, prefix_lens, path, accepted_len)

    def check():
        _check_compaction(*tensors)
        _check_moves(key_caches, block_table, prefix_lens, path, accepted_len)

    run_checked("compact_kv", backend, key_caches, tensors, check)


def _check_tensors(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Check shapes, dtypes, devices and strides."""
    num_heads, head_size = check_caches(key_cache, value_cache)
    device, dtypes = key_cache.device, dtypes_beside(key_cache)
    check_dense("slot_mapping", slot_mapping, (None,), (torch.int64,), device)
    shape = (slot_mapping.shape[0], num_heads, head_size)
    check_dense_rows("key", key, shape, dtypes, device)
    check_dense_rows("value", value, shape, (key.dtype,), device)


def check_rotation(
    cos: Tensor | None,
    sin: Tensor | None,
    num_rows: int | None,
    head_size: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check the factors of the rotary embedding, of `num_rows` rows (None = any)."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("cos, sin: expected both or neither")
    check_dense_rows("cos", cos, (num_rows, None), dtypes, device)
    size = cos.shape[1]
    if size % 2 != 0 or not 2 <= size <= head_size:
        raise ValueError(f"cos: expected an even size from 2 to {head_size}, got {size}")
    check_dense_rows("sin", sin, tuple(cos.shape), (cos.dtype,), device)


def check_slots(slot_mapping: Tensor, key_cache: Tensor) -> None:
    """Check the values of the slots on the CPU."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if key_cache.device.type == "cpu" and torch.any(
        (slot_mapping < -1) | (slot_mapping >= num_slots)
    ):
        raise ValueError(
            f"slot_mapping: expected -1 or a slot below {num_slots}, got {slot_mapping.tolist()}"
        )


def _check_compaction(
    key_caches: Tensor,
    value_caches: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    path: Tensor,
    accepted_len: Tensor,
) -> None:
    """Check shapes, dtypes, devices and strides."""
    check_caches(key_caches, value_caches, ("key_caches", "value_caches"), 5)
    device = key_caches.device
    check_dense_rows("block_table", block_table, (None, None), _INDEX, device)
    batch = block_table.shape[0]
    check_dense("prefix_lens", prefix_lens, (batch,), _INDEX, device)
    check_dense_rows("path", path, (batch, None), _INDEX, device)
    check_dense("accepted_len", accepted_len, (batch,), _INDEX, device)


def _check_moves(
    key_caches: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    path: Tensor,
    accepted_len: Tensor,
) -> None:
    """Check on the CPU that all moves stay within the table and the cache."""
    if key_caches.device.type != "cpu":
        return
    num_blocks, block_size = key_caches.shape[1:3]
    capacity = block_table.shape[1] * block_size
    for b, length in enumerate(accepted_len.tolist()):
        if length > path.shape[1]:
            raise ValueError(
                f"accepted_len[{b}]: expected at most {path.shape[1]} (the nodes of path), got"
                f" {length}"
            )
        prefix, nodes = int(prefix_lens[b]), path[b, : max(length, 0)].tolist()
        for i, node in enumerate(nodes):
            if node < 0:
                break
            for place in (prefix + node, prefix + 1 + i):
                if prefix < 0 or place >= capacity:
                    raise ValueError(
                        f"prefix_lens[{b}]: {prefix}, so that node {node} at {i} of path is outside"
                        f" the {capacity} places of block_table"
                    )
                block = int(block_table[b, place // block_size])
                if not 0 <= block < num_blocks:
                    raise ValueError(
                        f"block_table[{b}]: expected blocks from 0 to {num_blocks - 1} for the"
                        f" nodes of path, got {block}"
                    )
