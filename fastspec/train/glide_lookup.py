"""An initialisation of GLIDE's cross-attention that looks up what followed the current token."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastspec.drafters.glide.model import GlideCrossAttention, GlideLlamaForCausalLM
from fastspec.models.reduced_vocabulary import ReducedHead
from fastspec.train.data import Lesson

_REACH = 40  # tokens over which a rotary pair must turn by less than a radian to be used
_SCORE_SPREAD = 2.5  # initial standard deviation of the scores
_OUTPUT_SIZE = 0.3  # size of looked-up values, relative to the hidden states
_RIDGE = 1e-2  # relative to the mean square of a fit's inputs


class _Tokens(NamedTuple):
    """Ids [T] around each place of a text that has a token on both sides."""

    previous: Tensor
    current: Tensor
    following: Tensor


@torch.no_grad()
def start_as_lookup(draft: GlideLlamaForCausalLM, lesson: Lesson) -> None:
    """Initialise cross-attention to look up what followed earlier occurrences of the current token.

    The target's keys and values encode almost linearly their own token and the ones before and
    after it. Of every three query heads one looks for keys of the current token, one for keys right
    after it, and one for keys of the same two tokens; their outputs are the output embedding of the
    token after that key, or at it. Queries are fitted to linear discriminants of the keys, outputs
    to embeddings, both by ridge regression on one lesson. A one-layer draft cannot copy by
    self-attention alone, and learns this circuit late or never without this initialisation.
    """
    valid = lesson.valid[:, :-2] & lesson.valid[:, 1:-1] & lesson.valid[:, 2:]
    ids = lesson.token_ids
    tokens = _Tokens(*(part[valid] for part in (ids[:, :-2], ids[:, 1:-1], ids[:, 2:])))
    is_reduced = isinstance(draft.lm_head, ReducedHead)
    output: Any = draft.model.embed_tokens if is_reduced else draft.lm_head
    embeddings = output.weight.float()
    layers: Any = draft.model.layers
    for layer, (keys, values) in zip(layers, lesson.layers, strict=True):
        cross: GlideCrossAttention = layer.cross_attn
        states = _cross_input(draft, cross, lesson)[:, 1:][valid].float()
        rotary = cross.rotary_emb or draft.model.rotary_emb
        positions = torch.arange(keys.shape[2], device=keys.device)[None]
        cos, sin = rotary(keys.float(), positions)
        keys = _turned_back(keys.float(), cos, sin)[:, :, 1:].movedim(1, 2)[valid]  # [T, G, D]
        values = values.float()[:, :, 1:].movedim(1, 2)[valid]
        slow = (rotary.inv_freq * _REACH < 1).repeat(2)
        _start_layer(cross, states, keys, values, slow, tokens, embeddings)


def _start_layer(
    cross: GlideCrossAttention,
    states: Tensor,  # [T, E]
    keys: Tensor,  # [T, G, D]
    values: Tensor,
    slow: Tensor,  # [D] bool
    tokens: _Tokens,
    embeddings: Tensor,  # [V, E]
) -> None:
    size = cross.head_dim
    group = cross.q_proj.out_features // size // keys.shape[1]
    scale = _OUTPUT_SIZE * _rms(states) / _rms(embeddings[tokens.following])
    for kv_head in range(keys.shape[1]):
        key, value = keys[:, kv_head], values[:, kv_head]
        on_key = _discriminants(key, tokens.current, len(embeddings), slow)
        after_key = _discriminants(key, tokens.previous, len(embeddings), slow)
        lookups = (
            (on_key[tokens.current], tokens.following),
            (after_key[tokens.current], tokens.current),
            (on_key[tokens.current] + after_key[tokens.previous], tokens.following),
        )
        for head in range(kv_head * group, (kv_head + 1) * group):
            wanted, brought = lookups[head % len(lookups)]
            query = _fit(states, wanted)
            spread = (states @ query.T @ key[:: max(1, len(key) // 1000)].T * size**-0.5).std()
            rows = slice(head * size, (head + 1) * size)
            cross.q_proj.weight[rows] = (query * _SCORE_SPREAD / spread).to(cross.q_proj.weight)
            output = _fit(value - value.mean(0), embeddings[brought] - embeddings.mean(0))
            cross.o_proj.weight[:, rows] = (output * scale).to(cross.o_proj.weight)


def _cross_input(
    draft: GlideLlamaForCausalLM, cross: GlideCrossAttention, lesson: Lesson
) -> Tensor:
    """Return the input of one cross-attention of the draft, [B, S, E]."""
    inputs: list[Tensor] = []
    hook = cross.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    lesson.read_by(draft.model, draft.config.block_size)
    hook.remove()
    return inputs[0]


def _turned_back(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Remove the rotary embedding of keys [B, G, S, D]."""
    first, second = keys.chunk(2, dim=-1)
    return keys * cos[:, None] + torch.cat((second, -first), dim=-1) * sin[:, None]


def _discriminants(keys: Tensor, ids: Tensor, vocab_size: int, slow: Tensor) -> Tensor:
    """Return [V, D]: for each token the direction that separates its keys from all others."""
    counts = torch.bincount(ids, minlength=vocab_size)
    sums = keys.new_zeros(vocab_size, keys.shape[1]).index_add_(0, ids, keys)
    means = sums / counts.clamp(min=1)[:, None]
    within = keys - means[ids]
    if not within.any():
        raise ValueError("lookup_rows: too little text; expected rows in which tokens recur")
    covariance = within.T @ within / len(keys)
    covariance += _RIDGE * covariance.diagonal().mean() * torch.eye(len(slow)).to(keys)
    apart = (means - keys.mean(0))[:, slow]
    directions = keys.new_zeros(vocab_size, keys.shape[1])
    directions[:, slow] = torch.linalg.solve(covariance[slow][:, slow], apart.T).T
    return directions


def _fit(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Fit the matrix [O, I] that best maps inputs [T, I] to outputs [T, O]."""
    ridge = _RIDGE * len(inputs) * inputs.square().mean() * torch.eye(inputs.shape[1]).to(inputs)
    return torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ outputs).T


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
