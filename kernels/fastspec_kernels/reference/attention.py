"""The specification of the cache ops: a dense softmax over the keys that each query row sees."""

import torch
from torch import Tensor
from torch.nn.functional import pad


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
    """Write to (block, offset) of each slot that is not -1."""
    if cos is not None and sin is not None:
        key = rotate(key.float(), cos, sin).to(key.dtype)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    for cache, rows, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        cache[slots // block_size, slots % block_size] = _stored(rows[kept], cache.dtype, scale)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R values of each head [T, G, D] by factors [T, R], in the heads' dtype."""
    size = cos.shape[1]
    first, second = heads[..., :size].chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    rotated = heads[..., :size] * cos + swapped * sin
    return torch.cat([rotated, heads[..., size:]], dim=-1)


def _stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Convert rows to the cache's dtype; float8 is scaled and saturated."""
    if rows.dtype == dtype:
        return rows
    limit = torch.finfo(dtype).max
    units = rows.float() / torch.full((), scale, dtype=torch.float32, device=rows.device)
    return units.clamp(-limit, limit).to(dtype)


def compact_kv(
    key_caches: Tensor,
    value_caches: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    path: Tensor,
    accepted_len: Tensor,
) -> None:
    """Read every accepted node, then write them all."""
    num_blocks, block_size = key_caches.shape[1:3]
    table = pad(block_table.long(), (0, 1), value=-1)  # [B, M + 1], the last entry for no place
    step = torch.arange(path.shape[1], device=path.device)
    prefix = prefix_lens.long()[:, None]

    def slots(place: Tensor) -> Tensor:
        """Slot of each place [B, N], -1 where the sequence has none."""
        inside = (place >= 0) & (place < block_table.shape[1] * block_size)
        block = table.gather(1, torch.where(inside, place // block_size, table.shape[1] - 1))
        return torch.where(
            (block >= 0) & (block < num_blocks), block * block_size + place % block_size, -1
        )

    source, target = slots(prefix + path), slots(prefix + 1 + step.expand_as(path))
    moves = (step < accepted_len[:, None]) & ((path >= 0).cumprod(1) > 0)
    moves &= (source >= 0) & (target >= 0)
    source, target = source[moves], target[moves]
    for caches in (key_caches, value_caches):
        nodes = caches[:, source // block_size, source % block_size]
        caches[:, target // block_size, target % block_size] = nodes


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
    ancestor_mask: Tensor | None,
    return_logsumexp: bool,
    value_scale: float,
) -> tuple[Tensor, Tensor]:
    """Gather each context and determine visibility; `_attend` does the rest."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    logsumexp = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    bounds = cu_rows.tolist()
    for b, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        prefix = context - num_rows
        words = None if ancestor_mask is None else ancestor_mask[b]
        sees = _tail(num_rows, words, query.device)  # [rows, rows]
        depth = sees.sum(-1) - 1
        position = torch.cat([torch.arange(prefix, device=query.device), prefix + depth])  # [S]
        visible = pad(sees, (prefix, 0), value=True)  # [rows, S]
        if sliding_window > 0:
            visible &= position > (prefix + depth)[:, None] - sliding_window
        keys = _gather(key_cache, block_table[b], context)  # [S, G, D]
        values = _gather(value_cache, block_table[b], context)
        options = (scale, softcap, sinks)
        mixed, logsumexp[rows] = _attend(query[rows], keys, values, visible, *options)
        out[rows] = (mixed * value_scale).to(out.dtype)
    return out, logsumexp if return_logsumexp else logsumexp.new_empty(0)


def cross_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_rows: Tensor,
    scale: float,
    value_scale: float,
) -> Tensor:
    """Gather each context, which every row of the sequence sees in full."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    bounds = cu_rows.tolist()
    for b, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        if rows.start == rows.stop:
            continue
        keys = _gather(key_cache, block_table[b], context)
        values = _gather(value_cache, block_table[b], context)
        visible = torch.ones(
            (rows.stop - rows.start, context), dtype=torch.bool, device=query.device
        )
        mixed, _ = _attend(query[rows], keys, values, visible, scale, 0.0, None)
        out[rows] = (mixed * value_scale).to(out.dtype)
    return out


def _tail(num_rows: int, words: Tensor | None, device: torch.device) -> Tensor:
    """Return which of the last `num_rows` keys each of these rows sees, ignoring windows."""
    node = torch.arange(num_rows, device=device)
    if words is None:
        return node <= node[:, None]
    return (words[:num_rows, node // 64] >> (node % 64)) & 1 > 0


def _gather(cache: Tensor, blocks: Tensor, context: int) -> Tensor:
    """Gather the first `context` slots of the blocks in order; later entries are not read."""
    block_size = cache.shape[1]
    used = blocks[: -(-context // block_size)].long()
    return cache[used].flatten(0, 1)[:context].double()


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Score, cap, mask and normalise in float64: outputs [rows, H, D] and logsumexp [rows, H]."""
    queries = query.double().unflatten(1, (keys.shape[1], -1))  # [rows, G, H / G, D]
    scores = torch.einsum("tghd,sgd->tghs", queries, keys).flatten(1, 2) * scale  # [rows, H, S]
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible[:, None]  # [rows, 1, S]
    scores = scores.masked_fill(~visible, -torch.inf)
    logsumexp = torch.logsumexp(scores, -1)
    denominator = logsumexp
    if sinks is not None:
        denominator = torch.logaddexp(logsumexp, sinks.double())
    weights = (scores - denominator[..., None]).exp().where(visible, 0.0)
    weights = weights.unflatten(1, (keys.shape[1], -1))
    # A non-finite value must not be multiplied by the weight 0 of a row that does not see it.
    finite = torch.isfinite(values)
    spoilt = torch.einsum("ts,sgd->tgd", visible[:, 0].double(), (~finite).double()) > 0
    mixed = torch.einsum("tghs,sgd->tghd", weights, values.where(finite, 0.0))
    return mixed.masked_fill(spoilt[:, :, None], torch.nan).flatten(1, 2), logsumexp
