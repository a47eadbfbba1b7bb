"""Training drafts that read hidden states of their target: texts, lessons, trainer, acceptance."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fastspec.config.checks import require
from fastspec.config.files import write_whole
from fastspec.models.reduced_vocabulary import ReducedHead, reduced_rows
from fastspec.train.data import (
    Document,
    check_head,
    digest_of,
    most_frequent,
    states_file,
    stored_states,
)
from fastspec.train.distillation import FrozenHeadLoss
from fastspec.train.new_drafts import llama_shape
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.trainer import Advance, DraftTrainer, check_same_run, run_of


@dataclass(frozen=True)
class Text:
    """A text written by a target.

    Attributes:
        token_ids: [n] int64.
        start: number of given tokens; the draft learns from those after them.
    """

    token_ids: Tensor
    start: int = 1


def cut_texts(documents: Iterable[Document], context: int) -> list[Text]:
    """Cut documents to texts of up to `context` tokens.

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


def shape_and_tokens(
    target: PreTrainedModel, texts: Sequence[Text], shape: DraftShape
) -> tuple[dict[str, Any], Tensor]:
    """Return the fields of a draft's configuration that are those of its target, and the tokens [R]
    that it can write: all, or the most frequent of the texts' answers.

    Raises:
        ValueError: the shape does not fit the target.
    """
    size, own = shape.hidden_size, target.config.get_text_config(decoder=True).hidden_size
    require("hidden_size", size, size in (None, own), f"{own}, the target's")
    head: Any = target.get_output_embeddings()
    vocab_size = len(head.weight)
    num_ids = shape.reduced_vocab_size or vocab_size
    require("reduced_vocab_size", num_ids, num_ids <= vocab_size, f"at most {vocab_size}")
    width = shape.intermediate_size
    given = {} if width is None else {"intermediate_size": width}
    fields: dict[str, Any] = llama_shape(target, shape.layers, given)
    fields |= {"vocab_size": vocab_size, "draft_vocab_size": num_ids}
    answers = torch.cat([text.token_ids[text.start :] for text in texts])
    return fields, most_frequent(answers, num_ids).to(target.device)


@dataclass(frozen=True)
class StatesLesson:
    """One packed batch of texts, T tokens in all.

    Attributes:
        token_ids: [T] int64.
        lengths, starts: [B] int64, see `Text`.
        features: [T, L * E], the target's hidden states that the draft reads; these and the others
            have the target's dtype.
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
) -> Callable[[Tensor], StatesLesson]:
    """Run the target once over each text, and return a teacher that reads the stored states.

    Args:
        layers: layers of the target whose inputs are kept, in addition to its head's.
        token_ids: tokens that the draft can write.
        file, advance: as for `stored_states`.
    Raises:
        ValueError: the target's logits are not its head's output, or its layers' inputs are not
            what a draft reads.
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
    def lesson(indices: Tensor) -> StatesLesson:
        rows = indices.tolist()
        features, hidden = torch.cat([states[row] for row in rows]).to(device).split(sizes, dim=-1)
        return StatesLesson(
            torch.cat([texts[row].token_ids for row in rows]).to(device),
            torch.tensor([lengths[row] for row in rows], device=device),
            torch.tensor([texts[row].start for row in rows], device=device),
            features,
            (hidden @ head.T).softmax(-1),
            hidden,
        )

    return lesson


class StatesTrainer(DraftTrainer):
    """Trains a draft on the target's distribution, over several drafting steps at once."""

    kind: str  # of the draft
    first_learnt: int  # place of the first token of a text that it can guess

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of drafting steps that are trained."""

    @property
    def num_steps_measured(self) -> int:
        """Number of drafting steps whose acceptance is measured."""
        return self.num_steps

    @abstractmethod
    def rows(
        self, lesson: StatesLesson, num_steps: int, done: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield for each drafting step the head's input [N, E], and the place [N] of each row; a
        row with place t is trained on the target's output at place t.

        done: optimizer steps before this one, 0 to measure.
        """

    @abstractmethod
    def weight(self, step: int) -> float:
        """Return the weight of the loss of a step, counted from 0."""

    @staticmethod
    @abstractmethod
    def described(draft: Any) -> list[int]:
        """Return numbers of the draft's configuration that its weights depend on."""

    @staticmethod
    @abstractmethod
    def save(draft: Any, folder: Path) -> None:
        """Write the draft."""

    def _loss(self, lesson: Any) -> tuple[Tensor, Tensor]:
        draft: Any = self.draft
        head = draft.lm_head.linear.weight.to(lesson.features.dtype)
        weight = self.options.acceptance
        losses = [
            FrozenHeadLoss.apply(rows.to(head.dtype), head, lesson.target_probs[places], weight)
            for rows, places in self.rows(lesson, self.num_steps, int(self.record["steps"]))
        ]
        weights = torch.tensor([self.weight(step) for step in range(len(losses))])
        loss = (torch.stack(losses) * weights.to(losses[0])).sum() / weights.sum()
        return loss, (lesson.lengths - lesson.starts.clamp(min=self.first_learnt)).sum()


@torch.no_grad()
def measure_acceptance(
    rows_of: Callable[[StatesLesson, int], Iterable[tuple[Tensor, Tensor]]],
    reduced: ReducedHead,
    target: PreTrainedModel,
    teacher: Callable[[Tensor], StatesLesson],
    indices: Tensor,
    num_steps: int,
) -> dict[str, list[float]]:
    """Measure a draft's acceptance rate for each drafting step, over places of the texts.

    What comes before is the text's own, whether or not the draft would have guessed it.

    Args:
        rows_of: see `StatesTrainer.rows`; with a lesson and num_steps.
        reduced: the draft's head.
    Returns:
        "sampled_acceptance", at temperature 1, and "greedy_acceptance", by step, up to the last
        that a text is long enough for.
    """
    head: Any = target.get_output_embeddings()
    token_ids = reduced.token_ids
    totals = torch.zeros(3, num_steps, dtype=torch.float64)
    for index in indices:
        lesson = teacher(index[None])
        truth = head(lesson.last_hidden).float().softmax(-1)
        for step, (rows, places) in enumerate(rows_of(lesson, num_steps)):
            logits, probs = reduced.linear(rows.float()), truth[places]
            draft_probs = logits.softmax(-1)
            shared = torch.minimum(draft_probs, probs[:, token_ids]).sum()
            hits = token_ids[logits.argmax(-1)] == probs.argmax(-1)
            totals[:, step] += torch.stack(
                [shared.cpu(), hits.sum().cpu(), torch.tensor(len(hits))]
            )
    sampled, greedy = (totals[:2] / totals[2])[:, totals[2] > 0].tolist()
    return {"sampled_acceptance": sampled, "greedy_acceptance": greedy}


def train_on_states(
    kind: type[StatesTrainer],
    target: PreTrainedModel,
    draft: Any,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    options: TrainOptions,
    out: Path,
    resume: bool,
    advance: Advance,
    on_text: Callable[[int], None] = lambda num_texts: None,
    shape: DraftShape | None = None,
) -> dict[str, Any]:
    """Train a draft of a kind; write checkpoints, weights and record to the folder `out`.

    advance is called after each step, on_text with the number of texts that the target has read.
    shape says how the texts were cut, for the checkpoint.

    To resume a run, pass a draft made as at its beginning, of the same tokens and layers; the
    checkpoint replaces its weights.

    Raises:
        ValueError: a checkpoint to resume from is missing or of another run, or exists although
            resume is False.
    """
    layers = draft.config.target_layers
    token_ids = draft.lm_head.token_ids
    every = [*texts, *held_out]
    token_ids_of = [text.token_ids for text in every]
    processes = OneProcess(target.device)
    data = digest_of([*token_ids_of, torch.tensor([text.start for text in every])])
    run = run_of(options, processes, kind.kind, target, shape, data)
    run["draft"] = digest_of([token_ids, torch.tensor([*kind.described(draft), *layers])])
    if resume:  # before the states that the run to resume has stored are deleted
        check_same_run(out, run, draft)
    file = states_file(out, resume, target, token_ids_of, layers)
    teacher: Any = stored_lessons(target, layers, every, token_ids, file, on_text)
    trainer = kind(draft, teacher, len(texts), options, out, processes, run=run)
    if resume:
        trainer.resume()
    trainer.run(advance)
    places = torch.arange(len(texts), len(texts) + len(held_out))
    most = trainer.num_steps_measured
    measured = partial(trainer.rows, done=0), draft.lm_head, target, teacher, places, most
    record = trainer.record | measure_acceptance(*measured)
    write_whole(json.dumps(record, indent=1) + "\n", out / "record.json")
    kind.save(draft, out)
    file.unlink()
    return record
