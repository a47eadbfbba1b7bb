"""Training EAGLE-3 drafts over several consecutive drafting steps, as in use."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastspec.config.checks import require
from fastspec.config.files import write_whole
from fastspec.drafters.eagle3.loading import save_eagle3
from fastspec.drafters.eagle3.model import Eagle3Draft, EagleConfig, usual_layers
from fastspec.models.reduced_vocabulary import reduced_rows
from fastspec.models.twin import layers_of
from fastspec.train.distillation import FrozenHeadLoss
from fastspec.train.glide_data import (
    check_head,
    digest_of,
    most_frequent,
    states_file,
    stored_states,
)
from fastspec.train.new_drafts import llama_config, llama_shape, weights_of
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.trainer import Advance, DraftTrainer, check_same_run, run_of

_STEP_WEIGHT = 0.8  # weight of a step relative to the previous one, as published


@dataclass(frozen=True)
class Text:
    """A text written by a target.

    Attributes:
        token_ids: [n] int64.
        start: number of given tokens; the draft learns from those after them.
    """

    token_ids: Tensor
    start: int = 1


def cut_texts(documents: Iterable[tuple[list[int], int]], context: int) -> list[Text]:
    """Cut texts to up to `context` tokens; a document is its ids and the start of its answer.

    Raises:
        ValueError: none has an answer of two or more tokens after at least one token.
    """
    texts = []
    for ids, start in documents:
        for first in range(0, len(ids), context):
            part = torch.tensor(ids[first : first + context])
            begin = max(1, start - first)
            if begin + 1 < len(part):
                texts.append(Text(part, begin))
    if not texts:
        raise ValueError("data: no text is long enough to learn from")
    return texts


def make_eagle3(target: PreTrainedModel, texts: Sequence[Text], shape: DraftShape) -> Eagle3Draft:
    """Make a draft initialised from the target's last layer, with its embeddings and head.

    A reduced vocabulary consists of the most frequent tokens of the texts' answers. Initially the
    fused state is the last of the three hidden states, and attention uses only the half that reads
    it.

    Raises:
        ValueError: the shape does not fit the target, or its layers are too few or not in a list.
    """
    require("layers", shape.layers, shape.layers == 1, "1, as EAGLE-3 drafts have one layer")
    large = target.config.get_text_config(decoder=True)
    size = shape.hidden_size
    require("hidden_size", size, size in (None, large.hidden_size), "the target's")
    num_layers = len(layers_of(target))
    if min(usual_layers(num_layers)) < 0:
        name = type(target).__name__
        raise ValueError(
            f"target: {name} has {num_layers} layers, too few for EAGLE-3 to read three"
        )
    width = (
        {} if shape.intermediate_size is None else {"intermediate_size": shape.intermediate_size}
    )
    head: Any = target.get_output_embeddings()
    vocab_size = len(head.weight)
    num_ids = shape.reduced_vocab_size or vocab_size
    require("reduced_vocab_size", num_ids, num_ids <= vocab_size, f"at most {vocab_size}")
    fields: dict[str, Any] = llama_shape(target, 1, width) | {"vocab_size": vocab_size}
    fields |= {"draft_vocab_size": num_ids, "target_layers": usual_layers(num_layers)}
    draft = Eagle3Draft(llama_config(fields, EagleConfig))
    _start_as_last_layer(draft, target)
    answers = torch.cat([text.token_ids[text.start :] for text in texts])
    token_ids = most_frequent(answers, num_ids).to(target.device)
    embeddings: Any = target.get_input_embeddings()
    head_rows = reduced_rows(target, token_ids).float()
    draft.set_ends(embeddings.weight.float(), head_rows, token_ids, vocab_size)
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


@dataclass(frozen=True)
class UnrolledLesson:
    """One packed batch of texts, T tokens in all.

    Attributes:
        token_ids: [T].
        lengths, starts: [B], see `Text`.
        features: [T, 3E], the target's hidden states that the draft reads.
        target_probs: [T, R], over the tokens that the draft can write.
        last_hidden: [T, E], the input of the target's head.
    """

    token_ids: Tensor
    lengths: Tensor
    starts: Tensor
    features: Tensor
    target_probs: Tensor
    last_hidden: Tensor


@torch.no_grad()
def stored_lessons(
    target: PreTrainedModel,
    layers: Sequence[int],
    texts: Sequence[Text],
    token_ids: Tensor,
    file: Path,
    advance: Callable[[int], None] = lambda num_texts: None,
) -> Callable[[Tensor], UnrolledLesson]:
    """Run the target once over each text, and return a teacher that reads the stored states.

    Args:
        layers: layers of the target whose inputs are kept, in addition to its head's.
        token_ids: tokens that the draft can write.
        file, advance: as for `stored_states`.
    Raises:
        ValueError: the target's logits are not its head's output, or its layers' inputs are not
            what EAGLE-3 reads.
    """
    target, device, head = target.eval(), target.device, reduced_rows(target, token_ids)
    decoder: Any = target.get_decoder()
    size = target.config.get_text_config(decoder=True).hidden_size
    sizes = [len(layers) * size, size]

    def read(token_ids: Tensor) -> Tensor:
        given = {"input_ids": token_ids.to(device), "use_cache": False}
        states = decoder(**given, output_hidden_states=True)
        inputs = [states.hidden_states[layer] for layer in layers]
        if any(hidden.shape != states.last_hidden_state.shape for hidden in inputs):
            name = type(target).__name__
            raise ValueError(f"target: {name} passes its layers more than a hidden state per token")
        return torch.cat([*inputs, states.last_hidden_state], dim=-1)

    def read_texts(rows: list[int]) -> Tensor:
        return read(pad_sequence([texts[row].token_ids for row in rows], batch_first=True))

    sample_ids = texts[0].token_ids[None, :2].to(device)
    check_head("target", target, sample_ids, read(sample_ids)[..., -size:])
    lengths = [len(text.token_ids) for text in texts]
    states = stored_states(file, target.dtype, lengths, sum(sizes), read_texts, advance)

    @torch.no_grad()
    def lesson(indices: Tensor) -> UnrolledLesson:
        rows = indices.tolist()
        features, hidden = torch.cat([states[row] for row in rows]).to(device).split(sizes, dim=-1)
        return UnrolledLesson(
            torch.cat([texts[row].token_ids for row in rows]).to(device),
            torch.tensor([lengths[row] for row in rows], device=device),
            torch.tensor([texts[row].start for row in rows], device=device),
            features,
            (hidden @ head.T).softmax(-1),
            hidden,
        )

    return lesson


def unrolled(
    draft: Eagle3Draft, lesson: UnrolledLesson, num_steps: int
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
    draft: Eagle3Draft, lesson: UnrolledLesson, num_steps: int
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


class Eagle3Trainer(DraftTrainer):
    """Trains a draft on the target's distribution, over several drafting steps at once."""

    num_steps = 4

    def _loss(self, lesson: Any) -> tuple[Tensor, Tensor]:
        draft: Any = self.draft
        head = draft.lm_head.linear.weight.to(lesson.features.dtype)
        weight = self.options.acceptance
        losses = [
            FrozenHeadLoss.apply(rows.to(head.dtype), head, lesson.target_probs[places], weight)
            for rows, places in unrolled(draft, lesson, self.num_steps)
        ]
        weights = torch.tensor([_STEP_WEIGHT**step for step in range(len(losses))])
        loss = (torch.stack(losses) * weights.to(losses[0])).sum() / weights.sum()
        return loss, (lesson.lengths - lesson.starts.clamp(min=2)).sum()


@torch.no_grad()
def measure_acceptance(
    draft: Eagle3Draft,
    target: PreTrainedModel,
    teacher: Callable[[Tensor], UnrolledLesson],
    indices: Tensor,
    num_steps: int,
) -> dict[str, list[float]]:
    """Measure a draft's acceptance rate for each drafting step.

    Returns:
        "sampled_acceptance", at temperature 1, and "greedy_acceptance", by step, up to the last
        that a text is long enough for.
    """
    head: Any = target.get_output_embeddings()
    reduced: Any = draft.lm_head
    token_ids = reduced.token_ids
    totals = torch.zeros(3, num_steps, dtype=torch.float64)
    for index in indices:
        lesson = teacher(index[None])
        truth = head(lesson.last_hidden).float().softmax(-1)
        for step, (rows, places) in enumerate(unrolled(draft, lesson, num_steps)):
            logits, probs = reduced.linear(rows.float()), truth[places]
            draft_probs = logits.softmax(-1)
            shared = torch.minimum(draft_probs, probs[:, token_ids]).sum()
            hits = token_ids[logits.argmax(-1)] == probs.argmax(-1)
            totals[:, step] += torch.stack(
                [shared.cpu(), hits.sum().cpu(), torch.tensor(len(hits))]
            )
    sampled, greedy = (totals[:2] / totals[2])[:, totals[2] > 0].tolist()
    return {"sampled_acceptance": sampled, "greedy_acceptance": greedy}


def train_eagle3(
    target: PreTrainedModel,
    draft: Eagle3Draft,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    options: TrainOptions,
    out: Path,
    resume: bool,
    advance: Advance,
    on_text: Callable[[int], None] = lambda num_texts: None,
    shape: DraftShape | None = None,
) -> dict[str, Any]:
    """Train a draft; write checkpoints, weights and record to the folder `out`.

    advance is called after each step, on_text with the number of texts that the target has read.
    shape says how the texts were cut, for the checkpoint.

    To resume a run, pass a draft made as at its beginning, of the same tokens and layers; the
    checkpoint replaces its weights.

    Raises:
        ValueError: a checkpoint to resume from is missing or of another run, or exists although
            resume is False.
    """
    layers = draft.config.target_layers or usual_layers(len(layers_of(target)))
    token_ids = cast(Any, draft.lm_head).token_ids
    every = [*texts, *held_out]
    token_ids_of = [text.token_ids for text in every]
    processes = OneProcess(target.device)
    data = digest_of([*token_ids_of, torch.tensor([text.start for text in every])])
    shape_of_draft = torch.tensor([draft.config.norm_before_residual, *layers])
    run = run_of(options, processes, "eagle3", target, shape, data)
    run["draft"] = digest_of([token_ids, shape_of_draft])
    if resume:  # before the states that the run to resume has stored are deleted
        check_same_run(out, run, draft)
    file = states_file(out, resume, target, token_ids_of, layers)
    teacher: Any = stored_lessons(target, layers, every, token_ids, file, on_text)
    trainer = Eagle3Trainer(draft, teacher, len(texts), options, out, processes, run=run)
    if resume:
        trainer.resume()
    trainer.run(advance)
    places = torch.arange(len(texts), len(texts) + len(held_out))
    record = trainer.record | measure_acceptance(
        draft, target, teacher, places, trainer.num_steps + 1
    )
    write_whole(json.dumps(record, indent=1) + "\n", out / "record.json")
    save_eagle3(draft, out)
    file.unlink()
    return record
