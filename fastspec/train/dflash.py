"""Training DFlash drafts on blocks that begin at many places of a text at once."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import exp
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.drafters.dflash.loading import save_dflash
from fastspec.drafters.dflash.model import (
    DFlashAttention,
    DFlashConfig,
    DFlashDraft,
    block_embeddings,
    rotated,
)
from fastspec.models.reduced_vocabulary import ReducedHead, reduced_rows
from fastspec.models.twin import layers_of
from fastspec.train.new_drafts import llama_config, weights_of
from fastspec.train.options import DraftShape
from fastspec.train.states import StatesLesson, StatesTrainer, Text, shape_and_tokens

_OVERLAP = 3  # about as many blocks contain each token


def make_dflash(
    target: PreTrainedModel, texts: Sequence[Text], shape: DraftShape, block_size: int
) -> DFlashDraft:
    """Make a draft whose layers start as the target's last ones, with its embeddings and head.

    It reads the inputs of five layers spread over the target, or of all after the first if they are
    fewer. The mask token is the rarest in the answers, of several the one with the highest id. A
    reduced vocabulary consists of the most frequent tokens of the answers.

    Raises:
        ValueError: the shape or block size does not fit, or the target has one layer, no list of
            layers, or a head with a bias.
    """
    num_layers = len(layers_of(target))
    if num_layers < 2:
        raise ValueError(f"target: {type(target).__name__} has one layer, DFlash reads later ones")
    fields, token_ids = shape_and_tokens(target, texts, shape)
    answers = torch.cat([text.token_ids[text.start :] for text in texts])
    counts = answers.bincount(minlength=fields["vocab_size"])
    embeddings: Any = deepcopy(block_embeddings(target)).float()
    counts[~embeddings.weight.any(dim=1).cpu()] = len(answers) + 1  # not a row that only pads
    fields |= {
        "target_layers": _layers_read(num_layers),
        "block_size": block_size,
        "mask_token_id": int((counts == counts.min()).nonzero()[-1]),
    }
    draft: Any = DFlashDraft(llama_config(fields, DFlashConfig))
    _start_as_last_layers(draft, target)
    draft.embed_tokens = embeddings
    rows = reduced_rows(target, token_ids).float()
    draft.lm_head = ReducedHead(rows, token_ids, draft.config.vocab_size)
    return draft


def _layers_read(num_layers: int) -> list[int]:
    count = min(5, num_layers - 1)
    return [1 + round(i * (num_layers - 2) / max(1, count - 1)) for i in range(count)]


@torch.no_grad()
def _start_as_last_layers(draft: DFlashDraft, target: PreTrainedModel) -> None:
    size = draft.config.hidden_size
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, -size:] += torch.eye(size)
    decoder: Any = target.get_decoder()
    last = layers_of(target)[-len(draft.layers) :]
    source: dict[str, Tensor] = {}
    for index, layer in enumerate(last):
        source |= {f"layers.{index}.{name}": weight for name, weight in weights_of(layer)}
    source |= dict(weights_of(getattr(decoder, "norm", torch.nn.Identity())))
    for name, weight in draft.named_parameters():
        old = source.get(name.removeprefix("norm."))
        if old is not None and old.shape == weight.shape:
            weight.copy_(old)


def in_blocks(
    draft: DFlashDraft, lesson: StatesLesson, num_steps: int, shift: int = 0
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield for each token of a block after its first the head's input [N, E], and the place [N] of
    each row; a row with place t is trained on the target's output at place t.

    Blocks of num_steps + 1 tokens begin at every few tokens of an answer, from its last given token
    on, shifted by `shift` modulo their distance.
    """
    kind = lesson.features.dtype
    with torch.autocast(lesson.features.device.type, torch.bfloat16, kind == torch.bfloat16):
        yield from _in_blocks(draft, lesson, num_steps, shift)


def _in_blocks(
    draft: DFlashDraft, lesson: StatesLesson, num_steps: int, shift: int
) -> Iterable[tuple[Tensor, Tensor]]:
    device, size = lesson.features.device, num_steps + 1
    lengths, width = lesson.lengths, int(lesson.lengths.max())
    is_token = torch.arange(width, device=device) < lengths[:, None]
    text, column = is_token.nonzero(as_tuple=True)  # [T]
    begins = lengths.cumsum(0) - lengths  # the place of each text's first token
    stride = max(1, size // _OVERLAP)
    # Blocks begin with the last given token, or a token of the answer that another one follows.
    count = int((lengths - lesson.starts).max()) // stride + 1
    offset = shift % (lengths - lesson.starts).clamp(max=stride)  # each text has a block
    steps = stride * torch.arange(count, device=device)
    starts = (lesson.starts - 1 + offset)[:, None] + steps
    is_block = starts + 1 < lengths[:, None]  # [B, A]
    starts = starts.clamp(max=width - 1)
    places = starts[..., None] + torch.arange(size, device=device)  # [B, A, S]
    ids = torch.full(places.shape, draft.config.mask_token_id, device=device)
    first_rows = (begins[:, None] + starts).clamp(max=len(lesson.token_ids) - 1)
    ids[..., 0] = lesson.token_ids[first_rows]
    context = draft.hidden_norm(draft.fc(lesson.features.to(draft.fc.weight.dtype)))
    context = context.new_zeros(len(lengths), width, context.shape[-1]).index_put(
        (text, column), context
    )
    hidden = draft.embed_tokens(ids).to(context.dtype)
    whole = torch.arange(width, device=device).expand(len(lengths), -1)
    order = torch.cat([whole, places.flatten(1)], dim=1)
    factors = draft.rotary_emb(hidden, order)
    layers: Any = draft.layers
    for layer in layers:
        normed = layer.input_layernorm(hidden)
        hidden = hidden + _attend(layer.self_attn, normed, context, factors, starts)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    hidden = draft.norm(hidden)
    for step in range(1, size):
        is_row = is_block & (starts + step < lengths[:, None])
        if not is_row.any():
            return
        yield hidden[:, :, step][is_row], (begins[:, None] + starts + step - 1)[is_row]


def _attend(
    attention: DFlashAttention,
    block: Tensor,  # [B, A, S, E]
    context: Tensor,  # [B, W, E]
    factors: tuple[Tensor, Tensor],  # of the context's places and then the blocks'
    starts: Tensor,  # [B, A]
) -> Tensor:
    """Attend from blocks to the context before each, and to themselves."""
    num_blocks, size = block.shape[1:3]
    width, rows = context.shape[1], block.flatten(1, 2)
    both = torch.cat([context, rows], dim=1)
    key, value, query = (
        project(states).unflatten(-1, (-1, attention.head_dim))
        for project, states in (
            (attention.k_proj, both),
            (attention.v_proj, both),
            (attention.q_proj, rows),
        )
    )
    query = rotated(attention.q_norm(query), tuple(part[:, width:] for part in factors))
    key = rotated(attention.k_norm(key), factors)
    heads = key.shape[2]
    # [B, G, R, A, S, D] against [B, G, 1, W, D], and [B, G, 1, A, S, D]
    query = query.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4) * attention.scaling
    seen_key, seen_value, key, value = (
        part.transpose(1, 2)[:, :, None]
        for half in ((key[:, :width], value[:, :width]), (key[:, width:], value[:, width:]))
        for part in half
    )
    scores = query @ seen_key.transpose(3, 4)  # [B, G, R, A * S, W]
    is_before = torch.arange(width, device=starts.device) < starts[..., None]  # [B, A, W]
    is_before = is_before.repeat_interleave(size, dim=1)[:, None, None]
    scores = scores.masked_fill(~is_before, -torch.inf)
    in_block = (num_blocks, size)
    query, key, value = (part.unflatten(3, in_block) for part in (query, key, value))
    own = (query @ key.transpose(4, 5)).flatten(3, 4)  # [B, G, R, A * S, S]
    weights = torch.cat([scores, own], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    attended = weights[..., :width] @ seen_value
    own_weights = weights[..., width:].unflatten(3, in_block)
    attended = attended + (own_weights @ value).flatten(3, 4)
    attended = attended.permute(0, 3, 1, 2, 4).flatten(2)
    return attention.o_proj(attended).unflatten(1, in_block)


class DFlashTrainer(StatesTrainer):
    """Trains a draft on the target's distribution of all tokens of a block; near ones weigh more.

    Source: see `DFlashDraft`.
    """

    kind = "dflash"
    first_learnt = 1

    @property
    def num_steps(self) -> int:
        return cast(Any, self.draft).config.block_size - 1

    def rows(
        self, lesson: StatesLesson, num_steps: int, done: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        return in_blocks(cast(Any, self.draft), lesson, num_steps, done)

    def weight(self, step: int) -> float:
        return exp(-2 * step / self.num_steps)

    @staticmethod
    def described(draft: Any) -> list[int]:
        return [draft.config.block_size, draft.config.mask_token_id]

    @staticmethod
    def save(draft: Any, folder: Path) -> None:
        save_dflash(draft, folder)
