"""The training loop of the tiny models: wall-clock budget, checkpoints, resumption, progress."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from fastspec.train.trainer import muon
from scripts.tiny.optim import WallClockAnneal, set_rate

# Tensors of the same number of rows; the first holds token ids i64[B, S + 1].
Batch = tuple[torch.Tensor, ...]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopOptions:
    """How long, on how long rows and how fast to train, and where checkpoints go."""

    folder: Path
    minutes: float
    context: int
    rate: float = 4e-3
    warmup_steps: int = 50
    checkpoint_minutes: float = 5.0
    workers: int = 2
    threads: int = 1  # of each worker
    compiled: bool = True  # which takes a minute, and halves the time of a step
    resume: bool = False

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ValueError(f"minutes: must be positive, got {self.minutes}")


class TrainingLoop:
    """Minimises a loss until the wall-clock budget is spent.

    `draw` returns the next batch, `loss_of` the mean loss of some of its rows, `evaluate` named
    held-out numbers for the record. The record (steps, tokens, losses) is kept in
    `folder/record.json`, the checkpoint in `folder/checkpoint.pt`.

    Each worker thread runs its share of the rows, by default on one core: operators this small
    scale badly over several, and not at all on a busy machine.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: LoopOptions,
        draw: Callable[[], Batch],
        loss_of: Callable[[Batch], torch.Tensor],
        evaluate: Callable[[], dict[str, float]],
    ) -> None:
        self.model, self.options = model, options
        self.draw, self.loss_of, self.evaluate = draw, loss_of, evaluate
        self.parameters = list(model.parameters())
        self.optimizers = muon(model, options.rate, options.workers)
        self.pool = ThreadPoolExecutor(options.workers)
        torch.set_num_threads(options.threads)
        self.record: dict[str, float] = {"steps": 0, "tokens": 0, "minutes": 0.0}
        factor = self._restore() if options.resume else 1.0
        self.record["context"] = options.context
        self.anneal = WallClockAnneal(60 * options.minutes, options.warmup_steps, factor)

    def run(self) -> dict[str, float]:
        """Trains to the end of the budget; returns the record."""
        saved = started = time.monotonic()
        minutes_before = self.record["minutes"]
        columns = (
            *Progress.get_default_columns(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns) as progress:
            task = progress.add_task(self.options.folder.name, total=1.0, loss="")
            factor = 1 / self.options.warmup_steps
            while not self.anneal.finished:
                loss = self._step(factor)
                factor = self.anneal.advance()
                elapsed = (time.monotonic() - started) / 60
                self.record["minutes"] = minutes_before + elapsed
                done = elapsed / self.options.minutes
                progress.update(task, completed=done, loss=f"loss {loss:.3f}")
                if time.monotonic() - saved > 60 * self.options.checkpoint_minutes:
                    self._save()
                    saved = time.monotonic()
        self._save()
        return self.record

    def _step(self, factor: float) -> float:
        set_rate(self.optimizers, self.options.rate * factor)
        batch = self.draw()
        value = self._backward(batch)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        mean = self.record.get("train_loss", value)
        self.record["train_loss"] = mean + 0.02 * (value - mean)
        self.record["steps"] += 1
        self.record["tokens"] += batch[0].shape[0] * (batch[0].shape[1] - 1)
        return self.record["train_loss"]

    def _backward(self, batch: Batch) -> float:
        """Sets the gradients of the batch's mean loss; returns the loss."""

        def share(worker: int) -> tuple[torch.Tensor, ...]:
            loss = self.loss_of(tuple(part[worker :: self.options.workers] for part in batch))
            return loss.detach(), *torch.autograd.grad(loss, self.parameters)

        shares = zip(*self.pool.map(share, range(self.options.workers)), strict=True)
        loss, *gradients = (torch.stack(column).mean(dim=0) for column in shares)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss.item()

    def _save(self) -> None:
        self.record |= self.evaluate()
        folder = self.options.folder
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "factor": self.anneal.factor,
            "record": self.record,
        }
        torch.save(state, folder / "checkpoint.tmp")
        (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")
        (folder / "record.json").write_text(json.dumps(self.record, indent=1) + "\n")
        logger.info("%s: factor %.3f %s", folder.name, self.anneal.factor, self.record)

    def _restore(self) -> float:
        path = self.options.folder / "checkpoint.pt"
        if not path.exists():
            raise ValueError(f"resume: no checkpoint at {path}")
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.record = state["record"]
        return state["factor"]
