"""Attention over the block-paged KV cache."""

import torch
from torch import Tensor

from fastspec_kernels.backend import run_checked
from fastspec_kernels.checks import (
    FLOAT32,
    check_caches,
    check_dense,
    check_dense_rows,
    check_flag,
    check_int,
    check_number,
    check_positive,
    check_scales,
    check_tensor,
    dtypes_beside,
)

MAX_TREE_NODES = 128
_INDEX = (torch.int32,)
_MASK = (torch.int64,)


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
    return_logsumexp: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the last tokens of each sequence to its whole context in the paged cache.

    Sequence b owns query rows cu_rows[b]:cu_rows[b + 1]. They are the last of its context_lens[b]
    tokens, whose keys and values are already in the cache. They form a chain, where each row sees
    all tokens up to itself, or with `ancestor_mask` a tree, where node i sees all tokens before the
    tree and the nodes of its mask. A token's position is its index in the context; a node's is the
    number of tokens before the tree plus its depth, which is the number of nodes that it sees minus
    1. With a sliding window W the row at position t sees only positions above t - W.

    A score is query . key times scale, then softcap * tanh(score / softcap); the weights are the
    softmax of the scores, whose denominator also includes exp(sink) of the head. A row that sees
    nothing outputs 0. Query head h reads KV head h // (H / G). Prefill is this op with many rows,
    decoding with one, verification with the proposals and the token before them.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, last dimension contiguous; T may be 0.
            "triton" supports D up to 512, or 256 in float32.
        key_cache: [num_blocks, block_size, G, D], dtype of query or float8_e4m3fn, last two
            dimensions contiguous.
        value_cache: as key_cache, with the same strides.
        block_table: [B, M] int32, rows contiguous; entries past a context are never read. On a GPU
            an entry outside the cache is clamped to the nearest block.
        context_lens: [B] int32, contiguous, tokens in the cache, including the query tokens.
        cu_rows: [B + 1] int32, contiguous, from 0 to T.
        ancestor_mask: [B, N, ceil(N / 64)] int64, contiguous, N from 1 to 128; no sequence may have
            more than N rows. Bit j % 64 of word j // 64 of [b, i] is set if node i sees node j;
            bits past the rows of a sequence are ignored. Made by `build_tree`; None = chains.
        scale: None = D ** -0.5.
        sliding_window: W in tokens, 0 = off.
        softcap: bound of the scores, 0 = off.
        sinks: [H] float32 or dtype of query, contiguous, one extra logit per head, in the
            denominator only.
        return_logsumexp: also return the logarithm of the denominator, excluding sinks.
        key_scale: the key value that a stored 1 represents; 1.0 unless the cache is float8.
        value_scale: as key_scale, for values.
        backend: "auto", "cpu", "triton" or "reference"; float8 needs one of the last two.
    Returns:
        [T, H, D], dtype of query, contiguous; with return_logsumexp also [T, H] float32, -inf for
        a row that sees nothing.
    Raises:
        ValueError: a wrong dtype, shape, device, stride or range, or a backend that cannot run
            this; for tensors on the CPU also lengths, blocks or trees out of bounds.

    float32 accumulation. Unused cache slots may contain anything, and tokens that a row does not
    see never affect it. On one backend a row's bits depend only on its own query, position and
    context, and in a tree on which tokens of the context it sees: not on the batch, the order of
    blocks or the number of threads, and in a chain not on the other rows. One exception: on GPUs,
    sequences with more than 32 rows (tokens times H / G) of 16 bits are summed in other chunks and,
    from Hopper on, by other instructions. Compiled kernels do not synchronise with the host.
    """
    key_scale, value_scale = check_scales(key_cache, key_scale, value_scale)
    scale = scale_of_stored(query, scale, key_scale)
    softcap, sinks = check_options(query, sliding_window, softcap, sinks, return_logsumexp)
    check_score_scale(scale, softcap)
    tensors = (query, key_cache, value_cache, block_table, context_lens, cu_rows)
    options = (scale, sliding_window, softcap, sinks, ancestor_mask, return_logsumexp, value_scale)

    def check():
        check_attention(*tensors, sinks, ancestor_mask)

    out, logsumexp = run_checked("tree_attention", backend, key_cache, (*tensors, *options), check)
    return (out, logsumexp) if return_logsumexp else out


def cross_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    *,
    scale: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Attend from rows that are not in the cache to all context_lens[b] tokens of their sequence.

    A GLIDE drafter reads the target's cache this way; tokens whose keys and values the target has
    not written yet are excluded from context_lens.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, last dimension contiguous; T may be 0.
        key_cache, value_cache, block_table: as in `tree_attention`.
        context_lens: [B] int32, contiguous, tokens in the cache; rows output 0 if it is 0.
        cu_rows: [B + 1] int32, contiguous, from 0 to T; sequence b owns the rows
            cu_rows[b]:cu_rows[b + 1].
        scale: None = D ** -0.5.
        key_scale, value_scale, backend: as in `tree_attention`.
    Returns:
        [T, H, D], dtype of query, contiguous.
    Raises:
        ValueError: as in `tree_attention`.

    Accumulation, reproducibility, unused slots and synchronisation are as in `tree_attention`.
    Source: Du et al., 2402.02082.
    """
    key_scale, value_scale = check_scales(key_cache, key_scale, value_scale)
    scale = scale_of_stored(query, scale, key_scale)
    check_score_scale(scale)
    tensors = (query, key_cache, value_cache, block_table, context_lens, cu_rows)

    def check():
        _check_tensors(*tensors)
        _check_indices(query, key_cache, block_table, context_lens, cu_rows, False)

    arguments = (*tensors, scale, value_scale)
    return run_checked("cross_attention", backend, key_cache, arguments, check)


def check_options(
    query: Tensor,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    return_logsumexp: bool,
) -> tuple[float, Tensor | None]:
    """Check the options of the scores; return softcap as a float and sinks in float32."""
    check_int("sliding_window", sliding_window, 0)
    softcap = check_number("softcap", softcap, 0.0, "a finite float32 number >= 0")
    if softcap > 0.0:
        check_positive("softcap", softcap)
    check_flag("return_logsumexp", return_logsumexp)
    if isinstance(query, Tensor) and isinstance(sinks, Tensor) and sinks.dtype != torch.float32:
        check_tensor("sinks", sinks, (None,), (torch.float32, query.dtype), query.device)
        sinks = sinks.float()
    return softcap, sinks


def check_score_scale(scale: float, softcap: float = 0.0) -> None:
    """Check that the factors the kernels make of the two are finite in float32."""
    if 2 * softcap > FLOAT32.max:
        raise ValueError(f"softcap: too large for float32, got {softcap}")
    largest = abs(scale) / softcap if softcap else 2 * abs(scale)  # log2(e) < 2
    if largest > FLOAT32.max:
        raise ValueError(f"scale: too large for float32 with softcap {softcap}, got {scale}")


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    sinks: Tensor | None,
    ancestor_mask: Tensor | None,
) -> None:
    """Check the tensors of an attention in which queries are the last tokens of their contexts."""
    _check_tensors(query, key_cache, value_cache, block_table, context_lens, cu_rows)
    _check_sinks(query, sinks)
    if ancestor_mask is not None:
        _check_ancestor_mask(ancestor_mask, cu_rows)
    _check_indices(query, key_cache, block_table, context_lens, cu_rows, True)


def scale_of_stored(query: Tensor, scale: float | None, key_scale: float) -> float:
    """Return the factor of query . stored key.

    By default D ** -0.5; arbitrary if `query` is not valid, which is refused later.
    """
    if scale is not None:
        expected = "a finite float32 number"
        scale = check_number("scale", scale, -FLOAT32.max, expected)
        return check_number("scale", scale * key_scale, -FLOAT32.max, expected)
    head_size = query.shape[-1] if isinstance(query, Tensor) and query.shape else 0
    return head_size**-0.5 * key_scale if head_size > 0 else 1.0


def _check_tensors(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
) -> None:
    """Check shapes, dtypes, devices and strides."""
    num_kv_heads, head_size = check_caches(key_cache, value_cache)
    device = key_cache.device
    check_dense_rows("query", query, (None, None, head_size), dtypes_beside(key_cache), device)
    num_heads = query.shape[1]
    if num_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"query: {num_heads} heads, not a multiple of {num_kv_heads} KV heads")
    check_dense_rows("block_table", block_table, (None, None), _INDEX, device)
    batch = block_table.shape[0]
    check_dense("context_lens", context_lens, (batch,), _INDEX, device)
    check_dense("cu_rows", cu_rows, (batch + 1,), _INDEX, device)


def _check_sinks(query: Tensor, sinks: Tensor | None) -> None:
    """Check the sinks of the heads."""
    if sinks is not None:
        check_dense("sinks", sinks, (query.shape[1],), (torch.float32,), query.device)


def _check_ancestor_mask(ancestor_mask: Tensor, cu_rows: Tensor) -> None:
    """Check the tree masks and, if that needs no synchronisation, that they are large enough."""
    batch = cu_rows.shape[0] - 1
    check_dense("ancestor_mask", ancestor_mask, (batch, None, None), _MASK, cu_rows.device)
    num_nodes, words = ancestor_mask.shape[1:]
    if not 1 <= num_nodes <= MAX_TREE_NODES or words != -(-num_nodes // 64):
        raise ValueError(
            f"ancestor_mask: expected shape [{batch}, N, ceil(N / 64)] with N from 1 to"
            f" {MAX_TREE_NODES}, got {list(ancestor_mask.shape)}"
        )
    if cu_rows.device.type == "cpu" and batch > 0 and int(cu_rows.diff().max()) > num_nodes:
        raise ValueError(
            f"ancestor_mask: {num_nodes} nodes for trees of {cu_rows.diff().tolist()} rows"
        )


def _check_indices(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    holds_queries: bool,
) -> None:
    """Check the values of index tensors on the CPU, as the compiled kernel itself does."""
    if query.device.type != "cpu":
        return
    bounds, num_rows = cu_rows.tolist(), query.shape[0]
    if bounds[0] != 0 or bounds[-1] != num_rows or sorted(bounds) != bounds:
        raise ValueError(f"cu_rows: expected to rise from 0 to {num_rows}, got {bounds}")
    num_blocks, block_size = key_cache.shape[:2]
    capacity = block_table.shape[1] * block_size
    for b, context in enumerate(context_lens.tolist()):
        rows = bounds[b + 1] - bounds[b]
        if rows == 0:
            continue
        least = rows if holds_queries else 0
        if not least <= context <= capacity:
            raise ValueError(
                f"context_lens[{b}]: expected from {least} (the query rows in the cache) to"
                f" {capacity} (the room in block_table), got {context}"
            )
        blocks = block_table[b, : -(-context // block_size)].tolist()
        if blocks and not 0 <= min(blocks) <= max(blocks) < num_blocks:
            raise ValueError(
                f"block_table[{b}]: expected blocks from 0 to {num_blocks - 1} for the"
                f" {context} tokens of the context, got {blocks}"
            )
