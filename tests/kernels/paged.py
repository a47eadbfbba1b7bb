"""Paged caches for the tests of the cache ops: shuffled blocks, poison in every slot not in use."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .cases import backends_of

TABLE_POISON = (-1, 2**31 - 1)


def attention_backends(op: str) -> list[str]:
    """The backends to test; Triton's interpreter is too slow here, tests/triton has its cases."""
    names = backends_of(op)
    return names if torch.cuda.is_available() else [name for name in names if name != "triton"]


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


def in_float8(case: Paged) -> Paged:
    """The same case with its caches rounded to 8 bits; the poison stays NaN."""
    caches = [cache.float().to(torch.float8_e4m3fn) for cache in case.tensors[1:3]]
    return replace(case, key_cache=caches[0], value_cache=caches[1])


def random_trees(batch: int, num_nodes: int, reach: int = 4) -> Tensor:
    """Parents [B, N] int32, each one of the `reach` nodes before; a chain where that is 1."""
    node = torch.arange(num_nodes)
    parents = node - 1 - (torch.rand(batch, num_nodes) * node.clamp(max=reach)).long()
    return parents.clamp(min=-1).to(torch.int32)


def nodes_of(words: Tensor, num_rows: int) -> list[int]:
    """The nodes, below num_rows, whose bits are set in one row of an ancestor mask."""
    values = words.tolist()
    return [j for j in range(num_rows) if values[j // 64] >> j % 64 & 1]


def seen_places(
    length: int, num_rows: int, sliding_window: int, mask: Tensor | None
) -> list[list[int]]:
    """The places of the context that each of its last rows sees."""
    prefix = length - num_rows
    nodes = [
        list(range(i + 1)) if mask is None else nodes_of(mask[i], num_rows) for i in range(num_rows)
    ]
    position = list(range(prefix)) + [prefix + len(seen) - 1 for seen in nodes]
    places = [[*range(prefix), *(prefix + j for j in seen)] for seen in nodes]
    if sliding_window == 0:
        return places
    oldest = [position[prefix + i] - sliding_window + 1 for i in range(num_rows)]
    return [
        [place for place in seen if position[place] >= start]
        for seen, start in zip(places, oldest, strict=True)
    ]


def dense_attention(case: Paged, *args, **options) -> Tensor:
    """The definition in float64: what tree_attention returns first."""
    return dense_outputs(case, *args, **options)[0]


def dense_outputs(
    case: Paged,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    ancestor_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and logsumexp of tree_attention, one row at a time, in float64."""
    bounds = case.cu_rows.tolist()
    places = []
    for b, length in enumerate(case.context_lens.tolist()):
        mask = None if ancestor_mask is None else ancestor_mask[b]
        places += seen_places(length, bounds[b + 1] - bounds[b], sliding_window, mask)
    return dense_rows(case, places, scale, softcap, sinks)


def dense_rows(
    case: Paged,
    places: list[list[int]],
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each row to the given places of its context, and the logsumexp."""
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    logsumexp = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
    num_heads, head_size = case.query.shape[1:]
    group = num_heads // case.key_cache.shape[2]
    scale = head_size**-0.5 if scale is None else scale
    sequence = torch.repeat_interleave(case.cu_rows.diff()).tolist()
    for row, (b, seen) in enumerate(zip(sequence, places, strict=True)):
        if not seen:
            continue
        keys, values = (  # [H, S, D]
            dense[b][seen].double().transpose(0, 1).repeat_interleave(group, 0)
            for dense in (case.keys, case.values)
        )
        scores = (keys @ case.query[row].double()[:, :, None]).squeeze(2) * scale  # [H, S]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        extra = 0.0 if sinks is None else sinks.double().exp()
        out[row] = (weights[:, None] @ values).squeeze(1) / (weights.sum(1) + extra)[:, None]
        logsumexp[row] = weights.sum(1).log()
    return out, logsumexp
