"""Attention of the target's decoding steps on a CPU, for text written in large batches."""

from typing import Any

import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "fastspec_shared_key_value_head"


def use_shared_head_attention(model: LlamaForCausalLM) -> None:
    """Lets a model with one key-value head decode without a copy of its cache per query head."""
    AttentionInterface.register(NAME, shared_head_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def shared_head_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One new token a row: query [B, H, 1, D], key and value [B, 1, S, D]; else SDPA."""
    if query.shape[2] > 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scores = (query[:, :, 0] @ key[:, 0].mT).float() * scaling
    probs = scores.masked_fill(~attention_mask[:, 0], -torch.inf).softmax(dim=-1)
    return (probs.to(value.dtype) @ value[:, 0])[:, None], None
