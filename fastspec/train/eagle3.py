"""Training EAGLE-3 drafts over several consecutive drafting steps, as in use."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastspec.config.checks import require
from fastspec.drafters.eagle3.loading import save_eagle3
from fastspec.drafters.eagle3.model import Eagle3Draft, EagleConfig, usual_layers
from fastspec.models.reduced_vocabulary import reduced_rows
from fastspec.models.twin import layers_of
from fastspec.train.new_drafts import llama_config, weights_of
from fastspec.train.options import DraftShape
from fastspec.train.states import StatesLesson, StatesTrainer, Text, shape_and_tokens

_STEPS = 4
_STEP_WEIGHT = 0.8  # weight of a step relative to the previous one, as published


def make_eagle3(target: PreTrainedModel, texts: Sequence[Text], shape: DraftShape) -> Eagle3Draft:
    """Make a draft initialised from the target's last layer, with its embeddings and head.

    A reduced vocabulary consists of the most frequent tokens of the texts' answers. Initially the
    fused state is the last of the three hidden states, and attention uses only the half that reads
    it.

    Raises:
        ValueError: the shape does not fit the target, or its layers are too few or not in a list.
    """
    require("layers", shape.layers, shape.layers == 1, "1, as EAGLE-3 drafts have one layer")
    num_layers = len(layers_of(target))
    if min(usual_layers(num_layers)) < 0:
        name = type(target).__name__
        raise ValueError(
            f"target: {name} has {num_layers} layers, too few for EAGLE-3 to read three"
        )
    fields, token_ids = shape_and_tokens(target, texts, shape)
    fields["target_layers"] = usual_layers(num_layers)
    draft = Eagle3Draft(llama_config(fields, EagleConfig))
    _start_as_last_layer(draft, target)
    embeddings: Any = target.get_input_embeddings()
    head_rows = reduced_rows(target, token_ids).float()
    draft.set_ends(embeddings.weight.float(), head_rows, token_ids, draft.config.vocab_size)
    return draft


@torch.no_grad()
def _start_as_last_layer(draft: Eagle3Draft, target: PreTrainedModel) -> None:
    size = draft.config.hidden_size
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, 2 * size :] += torch.eye(size)
    decoder: Any = target.get_decoder()
    source: dict[str, Any] = dict(weights_of(layers_of(target)[-1]))
    source["hidden_norm.weight"] = source.get("input_layernorm.weight")
    source["norm.weight"] = getattr(getattr(decoder, "norm", None), "weight", None)
    for name, weight in [*draft.midlayer.named_parameters(), *draft.norm.named_parameters("norm")]:
        old = source.get(name)
        if old is None or old.shape[:-1] != weight.shape[:-1]:
            continue
        size = old.shape[-1]
        if weight.shape[-1] in (size, 2 * size):  # q, k and v have 2x wide inputs
            weight[..., weight.shape[-1] - size :] = old


def unrolled(
    draft: Eagle3Draft, lesson: StatesLesson, num_steps: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield for each drafting step the head's input [N, E], and the place [N] of each row.

    As in training-time test, a row reads the target's hidden state in the first step, and in each
    later one its own output of the previous step; it attends to earlier rows of the first step, and
    to its own rows of all steps. A row with place t is trained on the target's output at place t.
    """
    kind = lesson.features.dtype
    with torch.autocast(lesson.features.device.type, torch.bfloat16, kind == torch.bfloat16):
        yield from _unrolled(draft, lesson, num_steps)


def _unrolled(
    draft: Eagle3Draft, lesson: StatesLesson, num_steps: int
) -> Iterable[tuple[Tensor, Tensor]]:
    layer, lengths = draft.midlayer, lesson.lengths
    attention, width = layer.self_attn, int(lengths.max())
    head_dim = attention.head_dim
    is_token = torch.arange(width, device=lengths.device) < lengths[:, None]
    text, column = is_token.nonzero(as_tuple=True)  # [T]
    last = lengths[text] - 2  # a token of the same text must follow
    first = lesson.starts[text] - 1
    rows = (column + 1 <= last).nonzero()[:, 0]
    hidden = draft.fc(lesson.features[rows].to(draft.fc.weight.dtype)).float()
    own: list[tuple[Tensor, Tensor]] = []  # of the steps after the first, [B, S, G, D]
    past: tuple[Tensor, Tensor] | None = None
    for step in range(num_steps):
        embeddings = draft.embed_tokens(lesson.token_ids[rows + 1 + step])
        joined, residual = layer.join(embeddings, hidden)
        query, key, value = (
            part(joined).unflatten(-1, (-1, head_dim))
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = draft.rotary_emb(embeddings, column[rows][None] + step)
        query, key = apply_rotary_pos_emb(query, key, cos[0], sin[0])
        places = text[rows], column[rows]
        query, key, value = (
            part.new_zeros(len(lengths), width, *part.shape[1:]).index_put(places, part)
            for part in (query, key, value)
        )
        if past is None:
            past = key, value
        else:
            own.append((key, value))
        attended = _attend(query, past, own, attention.scaling)[places].flatten(1)
        hidden = layer.finish(residual, attention.o_proj(attended))
        is_draft = column[rows] + 1 >= first[rows]
        yield draft.norm(hidden[is_draft]), rows[is_draft] + 1 + step
        goes_on = is_draft & (column[rows] + 2 + step <= last[rows])
        rows, hidden = rows[goes_on], hidden[goes_on]
        if not len(rows):
            return


def _attend(
    query: Tensor,  # [B, S, H, D]
    past: tuple[Tensor, Tensor],  # [B, S, G, D]
    own: list[tuple[Tensor, Tensor]],
    scale: float,
) -> Tensor:
    """Attend to the rows of the first step up to itself, and to itself in later steps."""
    num_heads = past[0].shape[2]
    query = query.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4) * scale  # [B, G, R, S, D]
    key, value = (part.transpose(1, 2)[:, :, None] for part in past)
    scores = query @ key.transpose(3, 4)
    place = torch.arange(query.shape[3], device=query.device)
    scores = scores.masked_fill(place > place[:, None], -torch.inf)
    own = [tuple(part.transpose(1, 2)[:, :, None] for part in pair) for pair in own]  # pyright: ignore
    extra = [(query * key).sum(-1, keepdim=True).to(scores.dtype) for key, _ in own]
    weights = torch.cat([scores, *extra], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    out = weights[..., : len(place)] @ value
    for index, (_, own_value) in enumerate(own):
        out = out + weights[..., len(place) + index, None] * own_value
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


class Eagle3Trainer(StatesTrainer):
    """Trains a draft over several drafting steps, each of which reads the one before."""

    kind = "eagle3"
    first_learnt = 2

    @property
    def num_steps(self) -> int:
        return _STEPS

    @property
    def num_steps_measured(self) -> int:
        return _STEPS + 1  # as drafts may be longer

    def rows(
        self, lesson: StatesLesson, num_steps: int, done: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        return unrolled(cast(Any, self.draft), lesson, num_steps)

    def weight(self, step: int) -> float:
        return _STEP_WEIGHT**step

    @staticmethod
    def described(draft: Any) -> list[int]:
        return [int(draft.config.norm_before_residual)]

    @staticmethod
    def save(draft: Any, folder: Path) -> None:
        save_eagle3(draft, folder)
