"""Trains a draft on the lessons of a frozen target."""

import ctypes
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from fastspec.config.checks import require
from fastspec.config.files import write_whole
from fastspec.drafters.glide.model import GlideLlamaForCausalLM
from fastspec.train.data import Lesson, Teacher, describe_target
from fastspec.train.distillation import DistillationLoss
from fastspec.train.glide_lookup import start_as_lookup
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess

_LOSS_MEMORY = 0.98  # decay of the running mean
_MAX_NORM = 1.0
_TRIM_STEPS = 8
_OF_A_RUN = ("rate", "warmup", "distillation", "acceptance", "optimizer", "seed")
_IN_A_CHECKPOINT = {"draft", "optimizers", "record"}
_DAMAGE = (  # what torch.load raises where bytes are missing or changed
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)

Advance = Callable[[int, float], None]  # steps done, running mean of the loss


def draft_loss(draft: nn.Module, lesson: Lesson, block_size: int, distillation: float) -> Tensor:
    """Return the mean loss over the real tokens; block_size 0 = a plain draft without a glimpse."""
    counts = lesson.valid[:, 1:]
    logits = lesson.read_by(draft, block_size).logits[counts]
    loss = logits.new_zeros(())
    if distillation < 1:
        loss = loss + (1 - distillation) * cross_entropy(
            logits.float(), lesson.token_ids[:, 1:][counts]
        )
    if distillation > 0:
        loss = loss + distillation * DistillationLoss.apply(logits, lesson.target_logits[counts])
    return loss


def adam(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Make the optimizer of the published GLIDE recipe."""
    return [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def muon(model: nn.Module, rate: float, shares: int = 1) -> list[torch.optim.Optimizer]:
    """Make Muon for all matrices except embeddings and head, split in `shares` that can step in
    parallel, and AdamW for the rest."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_end = "embed_tokens" in name or "lm_head" in name
        (matrices if parameter.ndim == 2 and not is_end else rest).append(parameter)
    options = {"lr": rate, "weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}
    return [
        *(torch.optim.Muon(matrices[share::shares], **options) for share in range(shares)),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


OPTIMIZERS = {"adam": adam, "muon": muon}


def run_of(
    options: TrainOptions,
    processes: OneProcess,
    kind: str = "",
    target: PreTrainedModel | None = None,
    shape: DraftShape | None = None,
    data: str = "",
) -> dict[str, Any]:
    """Return what the steps of a run depend on, in the order in which `check_same_run` compares.

    That is all options but those of the start, the end and storage, and what is given of:

    Args:
        kind: of the draft.
        target: only its name, config, dtype and a checksum of some weights are recorded.
        shape: `context` and `held_out`, which the texts depend on.
        data: a digest of the texts.
    """
    return {
        "kind": kind,
        "dtype": None if target is None else str(target.dtype).removeprefix("torch."),
        "target": None if target is None else describe_target(target),
        **{name: getattr(options, name) for name in _OF_A_RUN},
        "batch_size": options.batch_size * processes.num_processes,
        "context": None if shape is None else shape.context,
        "held_out": None if shape is None else shape.held_out,
        "data": data,
    }


def check_same_run(folder: Path, run: dict[str, Any], draft: nn.Module) -> None:
    """Raise ValueError unless the checkpoint in a folder is of this run and of such a draft."""
    state, path = _load_checkpoint(folder, mmap=True), _checkpoint_in(folder)
    saved = state.get("run")
    if not isinstance(saved, dict) or not run.keys() <= saved.keys():
        raise ValueError(
            f"resume: {path} was written by an earlier version, which did not record of which run"
            " it is"
        )
    for name, value in run.items():
        if name == "kind" and saved[name] != value:
            raise ValueError(f"resume: {path} is of a draft of kind {saved[name]}, not {value}")
        if name == "draft" and saved[name] != value:
            raise ValueError(
                f"resume: {path} is of a draft of other tokens or layers; begin with the draft, or"
                " the vocabulary and data, of the run to resume"
            )
        expected = f"{saved[name]!r}, as the run to resume in {folder} has it"
        require(name, value, saved[name] == value, expected)
    shapes = [
        {name: weight.shape for name, weight in weights.items()}
        for weights in (state["draft"], draft.state_dict())
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(f"resume: {path} contains a draft of another shape")


def _checkpoint_in(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def _load_checkpoint(folder: Path, mmap: bool = False) -> dict[str, Any]:
    path = _checkpoint_in(folder)
    if not path.is_file():
        raise ValueError(f"resume: no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as parts:
            if not mmap and parts.testzip() is not None:  # torch does not compare the checksums
                raise _damaged(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except _DAMAGE as error:
        raise _damaged(path) from error
    if not isinstance(state, dict) or not state.keys() >= _IN_A_CHECKPOINT:
        raise _damaged(path)
    return state


def _damaged(path: Path) -> ValueError:
    return ValueError(f"resume: {path} is damaged or not a checkpoint of fastspec")


def return_free_memory() -> None:
    """Return freed memory to the system, where the C library can do so.

    Steps over texts of unlike lengths fragment its heap, which would otherwise grow for hours, to
    several times what a step needs.
    """
    loaded = ctypes.CDLL(None) if os.name == "posix" else None
    if (trim := getattr(loaded, "malloc_trim", None)) is not None:  # glibc has it
        trim(0)


class DraftTrainer:
    """Trains one draft on the lessons of a frozen target.

    The row order is a function of seed and step, so a resumed run sees the same rows as an
    uninterrupted one. It writes `folder/checkpoint.pt` and `folder/record.json`.

    Args:
        run: see `run_of`; by default of the options alone.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        teacher: Teacher,
        num_rows: int,
        options: TrainOptions,
        folder: Path,
        processes: OneProcess,
        run: dict[str, Any] | None = None,
    ):
        self.options, self.folder, self._processes = options, folder, processes
        self._teacher, self._num_rows = teacher, num_rows
        self._run = run_of(options, processes) if run is None else run
        self._block_size = 0
        draft.to(processes.device).train()  # pyright: ignore[reportArgumentType]
        if isinstance(draft, GlideLlamaForCausalLM):
            self._block_size = draft.config.block_size
            if count := min(options.lookup_rows, num_rows):
                start_as_lookup(draft, teacher(torch.linspace(0, num_rows - 1, count).long()))
        optimizers = OPTIMIZERS[options.optimizer](draft, options.rate)
        self._draft, *self._optimizers = processes.prepare(draft, *optimizers)
        self.record: dict[str, Any] = {"steps": 0, "tokens": 0, "losses": []}

    @property
    def _num_steps(self) -> int:
        return self.options.num_steps(self._num_rows, self._processes.num_processes)

    @property
    def draft(self) -> PreTrainedModel:
        """The current model."""
        return self._processes.unwrap_model(self._draft)

    def resume(self) -> None:
        """Continue from the last checkpoint; only the number of steps may have changed.

        Raises:
            ValueError: there is none, it is damaged, it belongs to another run, or more steps are
                done than there are to be.
        """
        check_same_run(self.folder, self._run, self.draft)
        state = _load_checkpoint(self.folder)
        done = int(state["record"]["steps"])
        fits = self._num_steps >= done
        require("steps", self._num_steps, fits, f"at least {done}, which are done")
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.record = state["record"]

    def run(self, advance: Advance) -> dict[str, Any]:
        """Train to the last step, calling `advance` after each.

        Raises:
            ValueError: the loss is not finite, after which no step would make the draft better.
        """
        num_steps = self._num_steps
        for step in range(int(self.record["steps"]), num_steps):
            lesson = self._teacher(self._indices(step))
            loss, num_tokens = self._step(lesson, self.options.factor(step, num_steps))
            if not isfinite(loss):
                raise ValueError(f"rate: the loss of step {step + 1} is {loss}; try a lower rate")
            mean = self.record.get("train_loss", loss)
            self.record["train_loss"] = _LOSS_MEMORY * mean + (1 - _LOSS_MEMORY) * loss
            self.record["steps"] = step + 1
            self.record["tokens"] += num_tokens
            self.record["losses"].append(round(loss, 4))
            advance(step + 1, self.record["train_loss"])
            if (step + 1) % _TRIM_STEPS == 0:
                return_free_memory()
            if (step + 1) % self.options.checkpoint_steps == 0 or step + 1 == num_steps:
                self._save()
        return self.record

    def _indices(self, step: int) -> Tensor:
        """Return this process's rows; each epoch visits every row once, in a different order."""
        processes, size = self._processes, self.options.batch_size
        first = (step * processes.num_processes + processes.process_index) * size
        places = torch.arange(first, first + size)
        indices = []
        for epoch in (places // self._num_rows).unique().tolist():
            generator = torch.Generator().manual_seed(self.options.seed + epoch)
            order = torch.randperm(self._num_rows, generator=generator)
            indices.append(order[places[places // self._num_rows == epoch] % self._num_rows])
        return torch.cat(indices)

    def _loss(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the tokens learnt from, and their number."""
        loss = draft_loss(self._draft, lesson, self._block_size, self.options.distillation)
        return loss, lesson.valid[:, 1:].sum()

    def _step(self, lesson: Lesson, factor: float) -> tuple[float, int]:
        """Take a step; return the mean loss over the tokens of all processes, and their number.

        Gradients of processes are averaged, so each loss is weighted by its number of tokens.
        """
        loss, num_own = self._loss(lesson)
        num_tokens = self._processes.reduce(num_own)
        share = loss * (num_own / num_tokens)
        self._processes.backward(share * self._processes.num_processes)
        self._processes.clip_grad_norm_(self._draft.parameters(), _MAX_NORM)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.rate * factor
            optimizer.step()
            optimizer.zero_grad()
        return self._processes.reduce(share.detach()).item(), int(num_tokens)

    def _save(self) -> None:
        self._processes.wait_for_everyone()
        if not self._processes.is_main_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "record": self.record,
            "run": self._run,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").replace(_checkpoint_in(self.folder))
        write_whole(json.dumps(self.record, indent=1) + "\n", self.folder / "record.json")
