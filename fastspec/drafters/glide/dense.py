"""Dense glimpses: the view of the target used in training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from fastspec.models.paged_model import PassThroughCache, cache_name


@dataclass(frozen=True)
class DenseGlimpse:
    """Keys and values of whole texts.

    Attributes:
        layers: for each draft layer, keys (rotated) and values [B, G, S, D] of its target layer.
        mask: [B or 1, 1, Q, S] bool, True where a query sees a key; None = all True.
    """

    layers: list[tuple[Tensor, Tensor]]
    mask: Tensor | None

    def attend(self, layer: int, query: Tensor) -> Tensor:
        key, value = (part.to(query.dtype) for part in self.layers[layer])
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)


def block_mask(valid: Tensor, block_size: int) -> Tensor:
    """Return the training mask [B, 1, S, S] of texts whose real tokens are marked in valid [B, S].

    It imitates drafting, where the newest tokens are not in the target's cache yet: the query at
    position i sees key j if i // block_size > j // block_size; in the first block, which would
    otherwise see nothing, if i >= j. Positions count real tokens; padding is seen only by padding,
    whose rows have no meaning.
    """
    positions = valid.long().cumsum(dim=1) - 1
    query, key = positions[:, :, None], positions[:, None, :]
    blocks_before = query // block_size > key // block_size
    visible = blocks_before | ((query < block_size) & (query >= key))
    return ((visible & valid[:, None, :]) | ~valid[:, :, None])[:, None]


class TopLayers(PassThroughCache):
    """Passes keys and values through, and keeps all those of the last layers, ignoring windows."""

    def __init__(self, num_target_layers: int, num_draft_layers: int):
        super().__init__()
        self._first = num_target_layers - num_draft_layers
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """By draft layer: keys and values [B, G, S, D]."""
        return [self._kept[layer] for layer in sorted(self._kept)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx >= self._first:
            self._kept[layer_idx] = (key_states, value_states)
        return key_states, value_states


@torch.no_grad()
def read_target(
    target: PreTrainedModel, token_ids: Tensor, valid: Tensor, num_draft_layers: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Run the target on texts [B, S]; return a draft's view of it, and logits [B, S, V].

    Raises:
        ValueError: the target has too few layers that use transformers' cache.
    """
    positions = (valid.long().cumsum(dim=1) - 1).clamp(min=0)
    given: dict[str, Any] = {"input_ids": token_ids, "attention_mask": valid.long()}
    given |= {"position_ids": positions}
    if not num_draft_layers:
        return [], target(**given, use_cache=False).logits
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    cache = TopLayers(num_layers, num_draft_layers)
    logits = target(**given, **{cache_name(target): cache}, use_cache=True).logits
    if len(cache.kept) != num_draft_layers:
        raise ValueError(
            f"target: {type(target).__name__} gave keys of {len(cache.kept)} layers, but the draft"
            f" needs {num_draft_layers}"
        )
    return cache.kept, logits
