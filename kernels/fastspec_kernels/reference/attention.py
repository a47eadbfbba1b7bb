"""The specification of the cache ops: a dense softmax over the keys that each query row sees."""

import torch
from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write by (block, offset) of each slot that is not -1."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    key_cache[slots // block_size, slots % block_size] = key[kept]
    value_cache[slots // block_size, slots % block_size] = value[kept]


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Gather each context, then score, mask, cap and normalise in float64."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    bounds = cu_rows.tolist()
    for b, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        keys = _gather(key_cache, block_table[b], context)  # [S, G, D]
        values = _gather(value_cache, block_table[b], context)
        position = torch.arange(context - num_rows, context, device=query.device)[:, None]
        token = torch.arange(context, device=query.device)[None]
        hidden = token > position  # [rows, S]
        if sliding_window > 0:
            hidden |= token <= position - sliding_window
        queries = query[rows].double().unflatten(1, (keys.shape[1], -1))  # [rows, G, H / G, D]
        scores = torch.einsum("tghd,sgd->tghs", queries, keys).flatten(1, 2) * scale  # [rows, H, S]
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        if sinks is not None:
            sink = sinks.double()[None, :, None].expand(num_rows, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :context].unflatten(1, (keys.shape[1], -1))
        # A value that is not finite must not meet the weight 0 of a row that does not see it.
        finite = torch.isfinite(values)
        spoilt = torch.einsum("ts,sgd->tgd", (~hidden).double(), (~finite).double()) > 0
        mixed = torch.einsum("tghs,sgd->tghd", weights, values.where(finite, 0.0))
        mixed = mixed.masked_fill(spoilt[:, :, None], torch.nan)
        out[rows] = mixed.flatten(1, 2).to(out.dtype)
    return out


def _gather(cache: Tensor, blocks: Tensor, context: int) -> Tensor:
    """The first `context` slots of the blocks in order; table entries past them are not read."""
    block_size = cache.shape[1]
    used = blocks[: -(-context // block_size)].long()
    return cache[used].flatten(0, 1)[:context].double()
