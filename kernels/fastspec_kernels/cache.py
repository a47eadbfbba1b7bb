"""Writes to the block-paged KV cache."""

import torch
from torch import Tensor

from fastspec_kernels import reference
from fastspec_kernels.backend import resolve
from fastspec_kernels.checks import (
    check_caches,
    check_contiguous,
    check_last_contiguous,
    check_tensor,
)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write the keys and values of new tokens into their cache slots, in place.

    Slot s is row s % block_size of block s // block_size; token t goes to slot_mapping[t], and -1
    skips it. Two tokens must not share a slot.

    Args:
        key: [T, G, D] float32, bfloat16 or float16, last dimension contiguous, any other strides.
        value: [T, G, D], as key.
        key_cache: [num_blocks, block_size, G, D], dtype of key, last two dimensions contiguous.
        value_cache: as key_cache, with the same strides.
        slot_mapping: [T] int64, contiguous.
        backend: "auto", "cpu", "cuda" or "reference".
    Raises:
        ValueError: a wrong dtype, shape, device or stride, or a backend that cannot run this; for
            tensors on the CPU also a slot outside the cache, before anything is written.

    No host synchronisation by a compiled kernel. All other slots keep their bits.
    """
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    try:
        if resolve("store_kv", backend, key_cache.device) != "reference":
            return torch.ops.fastspec.store_kv.default(*tensors)
    except (AttributeError, RuntimeError, ValueError):
        _check_tensors(*tensors)  # names the argument that the kernel refused
        raise
    _check_tensors(*tensors)
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if key_cache.device.type == "cpu" and torch.any(
        (slot_mapping < -1) | (slot_mapping >= num_slots)
    ):
        raise ValueError(
            f"slot_mapping: expected -1 or a slot below {num_slots}, got {slot_mapping.tolist()}"
        )
    return reference.store_kv(*tensors)


def _check_tensors(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Check shapes, dtypes, devices and strides."""
    num_heads, head_size = check_caches(key_cache, value_cache)
    device, dtypes = key_cache.device, (key_cache.dtype,)
    check_tensor("slot_mapping", slot_mapping, (None,), (torch.int64,), device)
    check_contiguous("slot_mapping", slot_mapping)
    shape = (slot_mapping.shape[0], num_heads, head_size)
    check_tensor("key", key, shape, dtypes, device)
    check_last_contiguous("key", key)
    check_tensor("value", value, shape, dtypes, device)
    check_last_contiguous("value", value)
