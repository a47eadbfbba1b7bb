"""Attention of T5-type decoders: relative bias over the pages, then the encoder's output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from fastspec.models.layout import KVCache, PagedStep
from fastspec.models.paged_model import no_mask
from fastspec_kernels import cross_attention, store_kv

T5_ATTENTION_NAME = "fastspec_t5"


@dataclass
class T5Step:
    """One packed forward pass of a T5-type decoder; B sequences with at most Q of the T tokens.

    Attributes:
        paged: the pass over the decoder's own pages.
        encoded: by layer, keys and values of what the encoder made of the inputs.
        encoded_table: [B, M] int32, the blocks of these.
        encoded_lens: [B] int32.
        rows: [B, Q] int64, place of each token in the packed batch; any place fills a short row.
        places: [T] int64, place of each token in the flattened `rows`.
        positions: [B, Q] int64.
        bias: [B, H, Q, S] added to the scores of the S slots, -inf where a token does not look.
            Layers without a bias of their own use that of the layer before.
    """

    paged: PagedStep
    encoded: list[KVCache]
    encoded_table: Tensor
    encoded_lens: Tensor
    rows: Tensor
    places: Tensor
    positions: Tensor
    bias: Tensor | None = None


def t5_attention(
    module: Any,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    t5_step: T5Step | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Self-attention over the pages or cross-attention over the encoder's; returns [1, T, H, D]."""
    if t5_step is None:
        name = type(module).__name__
        raise ValueError(
            f"{name}: attention {T5_ATTENTION_NAME!r} only runs inside a fastspec engine"
        )
    attend = _self_attention if module.is_causal else _cross_attention
    return attend(module, query, key, value, scaling, t5_step)[None], None


AttentionInterface.register(T5_ATTENTION_NAME, t5_attention)
AttentionMaskInterface.register(T5_ATTENTION_NAME, no_mask)


def _cross_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, step: T5Step
) -> Tensor:
    key_cache, value_cache = step.encoded[module.layer_idx]
    return cross_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        step.encoded_table,
        step.encoded_lens,
        step.paged.cu_rows,
        scale=scale,
        backend=step.paged.backend,
    )


def _self_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, step: T5Step
) -> Tensor:
    """Gather pages and tokens into padded batches: tree_attention takes no bias."""
    paged = step.paged
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, G, D]
    layer = module.layer_idx
    caches = paged.caches.get(layer) or paged.probed_cache(layer, key, value, 0)
    store_kv(key, value, *caches, paged.slot_mapping, backend=paged.backend)
    table = paged.block_table.clamp(min=0)
    slots = torch.arange(table.shape[1] * caches[0].shape[1], device=table.device)
    unused = (slots >= paged.context_lens[:, None])[:, :, None, None]
    # What unused slots hold may not be finite, and would pass even a weight of zero.
    keys, values = (
        cache[table].flatten(1, 2).masked_fill_(unused, 0).transpose(1, 2) for cache in caches
    )
    if module.has_relative_attention_bias:
        step.bias = _relative_bias(module, *_looks(step, slots))
    padded = query[0][:, step.rows].transpose(0, 1)  # [B, H, Q, D]
    out = scaled_dot_product_attention(padded, keys, values, attn_mask=step.bias, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[step.places]


def _looks(step: T5Step, slots: Tensor) -> tuple[Tensor, Tensor]:
    """How far back each slot is for each token, and whether the token sees it: [B, Q, S] both."""
    if step.paged.ancestor_mask is None:
        distances = step.positions[:, :, None] - slots
        return distances, distances >= 0
    counts = step.paged.cu_rows.diff()[:, None]
    nodes = slots - (step.paged.context_lens[:, None] - counts)  # [B, S], before the tree below 0
    in_tree = (nodes >= 0) & (nodes < counts)
    places = nodes.clamp(0, step.rows.shape[1] - 1)
    positions = torch.where(in_tree, step.positions.gather(1, places), slots)
    own = (step.rows - step.rows[:, :1])[:, :, None]  # [B, Q, 1]
    masks = step.paged.ancestor_mask.take_along_dim(own, dim=1)  # [B, Q, ceil(N / 64)]
    words = masks.take_along_dim((places // 64)[:, None], dim=2)
    is_ancestor = (words >> (places % 64)[:, None]) & 1 == 1
    distances = step.positions[:, :, None] - positions[:, None]
    return distances, torch.where(in_tree[:, None], is_ancestor, nodes[:, None] < 0)


def _relative_bias(module: Any, distances: Tensor, is_seen: Tensor) -> Tensor:
    """[B, H, Q, S]: by how far back a slot is; from the largest distance on it stays the same."""
    far = module.relative_attention_max_distance
    by_distance = module.compute_bias(1, far + 1, past_seen_tokens=far)[0, :, 0].flip(
        -1
    )  # [H, far+1]
    bias = by_distance[:, distances.clamp(0, far)].masked_fill(~is_seen, -torch.inf)
    return bias.transpose(0, 1)
