"""Attention over the block-paged KV cache."""

import math

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

_INDEX = (torch.int32,)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    *,
    ancestor_mask: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend from the last tokens of each sequence to its whole context in the paged cache.

    Sequence b owns query rows cu_rows[b]:cu_rows[b + 1]. They are the last tokens of its
    context_lens[b] tokens, whose keys and values the cache already holds. The row at position t
    sees the keys j <= t, and with a sliding window W only t - W < j. A score is query . key times
    scale, then softcap * tanh(score / softcap); the weights are the softmax of the scores, whose
    denominator also counts exp(sink) of the head. Query head h reads KV head h // (H / G). Prefill
    is this op with many rows, decoding with one, verification with K + 1.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, last dimension contiguous; T may be 0.
        key_cache: [num_blocks, block_size, G, D], dtype of query, last two dimensions contiguous.
        value_cache: as key_cache, with the same strides.
        block_table: [B, M] int32, rows contiguous; entries past a context are never read.
        context_lens: [B] int32, tokens in the cache, the query tokens included.
        cu_rows: [B + 1] int32, from 0 to T.
        ancestor_mask: None, a causal chain.
        scale: None means D ** -0.5.
        sliding_window: W in tokens, 0 is off.
        softcap: bound of the scores, 0 is off.
        sinks: [H] float32 or dtype of query, one more logit per head, in the denominator only.
        backend: "auto", "cpu", "cuda" or "reference".
    Returns:
        [T, H, D], dtype of query, contiguous.
    Raises:
        ValueError: a wrong dtype, shape, device, stride or range, or a backend that cannot run
            this; for tensors on the CPU also lengths or blocks that lie outside their bounds.

    float32 accumulation. Unused cache slots may hold anything. On one backend a row's bits depend
    on its own query, position and context only: not on the batch, the other rows, the order of
    blocks or the number of threads. No host synchronisation by a compiled kernel.
    """
    if ancestor_mask is not None:
        raise ValueError("ancestor_mask: token trees are not supported yet")
    if scale is None:
        scale = _default_scale(query)
    if isinstance(sinks, Tensor) and sinks.dtype != torch.float32:
        check_tensor("sinks", sinks, (None,), (torch.float32, query.dtype), query.device)
        sinks = sinks.float()
    tensors = (query, key_cache, value_cache, block_table, context_lens, cu_rows)
    options = (scale, sliding_window, softcap, sinks)
    try:
        if resolve("tree_attention", backend, key_cache.device) != "reference":
            return torch.ops.fastspec.tree_attention.default(*tensors, *options)
    except (AttributeError, RuntimeError, ValueError):
        _check_tensors(*tensors, sinks)  # names the argument that the kernel refused
        _check_numbers(scale, sliding_window, softcap)
        raise
    _check_tensors(*tensors, sinks)
    _check_numbers(scale, sliding_window, softcap)
    _check_indices(query.shape[0], key_cache.shape, block_table, context_lens, cu_rows)
    return reference.tree_attention(*tensors, *options)


def _default_scale(query: Tensor) -> float:
    """D ** -0.5, and any number for what is not a query, which is refused later."""
    head_size = query.shape[-1] if isinstance(query, Tensor) and query.shape else 0
    return head_size**-0.5 if head_size > 0 else 1.0


def _check_tensors(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    sinks: Tensor | None,
) -> None:
    """Check shapes, dtypes, devices and strides."""
    num_kv_heads, head_size = check_caches(key_cache, value_cache)
    device = key_cache.device
    check_tensor("query", query, (None, None, head_size), (key_cache.dtype,), device)
    check_last_contiguous("query", query)
    num_heads = query.shape[1]
    if num_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"query: {num_heads} heads, not a multiple of {num_kv_heads} KV heads")
    check_tensor("block_table", block_table, (None, None), _INDEX, device)
    check_last_contiguous("block_table", block_table)
    batch = block_table.shape[0]
    check_tensor("context_lens", context_lens, (batch,), _INDEX, device)
    check_contiguous("context_lens", context_lens)
    check_tensor("cu_rows", cu_rows, (batch + 1,), _INDEX, device)
    check_contiguous("cu_rows", cu_rows)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), (torch.float32,), device)
        check_contiguous("sinks", sinks)


def _check_numbers(scale: float, sliding_window: int, softcap: float) -> None:
    """Check the ranges of the scalar options."""
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if sliding_window < 0:
        raise ValueError(f"sliding_window: expected >= 0, got {sliding_window}")
    if not (math.isfinite(softcap) and softcap >= 0.0):
        raise ValueError(f"softcap: expected a finite number >= 0, got {softcap}")


def _check_indices(
    num_rows: int,
    cache_shape: torch.Size,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
) -> None:
    """Check the values of the index tensors, as the compiled CPU kernel does on its own."""
    bounds = cu_rows.tolist()
    if bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
        raise ValueError(f"cu_rows: expected to rise from 0 to {num_rows}, got {bounds}")
    num_blocks, block_size = cache_shape[:2]
    for b, context in enumerate(context_lens.tolist()):
        rows = bounds[b + 1] - bounds[b]
        if rows == 0:
            continue
        capacity = block_table.shape[1] * block_size
        if not rows <= context <= capacity:
            raise ValueError(
                f"context_lens[{b}]: expected from {rows} (the query rows) to {capacity}"
                f" (the room in block_table), got {context}"
            )
        blocks = block_table[b, : -(-context // block_size)].tolist()
        if min(blocks) < 0 or max(blocks) >= num_blocks:
            raise ValueError(
                f"block_table[{b}]: expected blocks from 0 to {num_blocks - 1} for the"
                f" {context} tokens of the context, got {blocks}"
            )
