"""Paged caches for the tests of the cache ops: shuffled blocks, poison in every slot not in use."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

TABLE_POISON = (-1, 2**31 - 1)


@dataclass
class Paged:
    """Arguments of tree_attention in order, and the dense context of each sequence."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_rows: Tensor
    keys: list[Tensor]  # [S, G, D] each
    values: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[:6])

    def to(self, device: str) -> "Paged":
        names = [field.name for field in fields(self)[:6]]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def paged(
    context_lens: list[int],
    num_rows: list[int],
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    """Random queries and contexts; the cache is poisoned with NaN, the table with wild entries."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    shape = (sum(num_blocks) + 2, block_size, num_kv_heads, head_size)
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    width = max(num_blocks, default=0) + 2
    block_table = torch.tensor(TABLE_POISON, dtype=torch.int32).repeat(len(context_lens), width)
    free = torch.randperm(shape[0])
    keys, values = [], []
    for b, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
        blocks, free = free[:count], free[count:]
        block_table[b, :count] = blocks
        for cache, dense in ((key_cache, keys), (value_cache, values)):
            context = torch.randn(length, num_kv_heads, head_size).to(dtype)
            token = torch.arange(length)
            cache[blocks[token // block_size], token % block_size] = context
            dense.append(context)
    cu_rows = torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32)
    query = torch.randn(sum(num_rows), num_kv_heads * group, head_size).to(dtype)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    return Paged(query, key_cache, value_cache, block_table, lengths, cu_rows, keys, values)


def dense_attention(
    case: Paged,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one row and one head at a time, in float64."""
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    num_heads, head_size = case.query.shape[1:]
    group = num_heads // case.key_cache.shape[2]
    scale = head_size**-0.5 if scale is None else scale
    bounds = case.cu_rows.tolist()
    for b, length in enumerate(case.context_lens.tolist()):
        for row in range(bounds[b], bounds[b + 1]):
            position = length - (bounds[b + 1] - row)
            first = max(0, position - sliding_window + 1) if sliding_window else 0
            for head in range(num_heads):
                keys = case.keys[b][first : position + 1, head // group].double()
                values = case.values[b][first : position + 1, head // group].double()
                scores = keys @ case.query[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                extra = sinks[head].double().exp() if sinks is not None else 0.0
                out[row, head] = weights @ values / (weights.sum() + extra)
    return out
