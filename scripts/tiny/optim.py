"""Optimisers and the learning-rate schedule of the tiny models' training."""

import time
from collections.abc import Iterator

import torch

STEP_SECONDS_CAP = 3.0  # in typical steps: a longer one was a pause of the whole process


class WallClockAnneal:
    """Learning-rate factor: a linear warm-up, then a linear decay that reaches 0 at the deadline.

    The factor falls by `step time / remaining time` of itself at each step, which is the straight
    line when nothing disturbs it. A step much longer than the typical one (the process was stopped)
    counts as a typical step, so that a pause steepens the decay instead of skipping a part of it.
    """

    def __init__(self, seconds: float, warmup_steps: int, factor: float = 1.0) -> None:
        self.factor = factor
        self.warmup_steps = warmup_steps
        self.steps = 0
        self.typical = 0.0
        self.last = time.monotonic()
        self.deadline = self.last + seconds

    @property
    def finished(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() >= self.deadline

    def advance(self) -> float:
        """Accounts for the step just made; returns the factor of the next one."""
        now = time.monotonic()
        elapsed, self.last = now - self.last, now
        self.typical = self.typical or elapsed
        elapsed = min(elapsed, STEP_SECONDS_CAP * self.typical)
        self.typical += 0.1 * (elapsed - self.typical)
        self.steps += 1
        remaining = self.deadline - now + elapsed
        self.factor *= max(0.0, 1.0 - elapsed / remaining)
        return self.factor * min(1.0, (self.steps + 1) / self.warmup_steps)


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Sets one learning rate everywhere (Muon's updates are scaled to AdamW's size)."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def windows(
    token_ids: torch.Tensor, rows: int, context: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Endless batches i64[rows, context + 1]: each epoch visits every window once, shuffled."""
    while True:
        offset = int(torch.randint(context, (1,), generator=generator))
        count = (len(token_ids) - offset - 1) // context
        starts = torch.randperm(count, generator=generator) * context + offset
        for batch in starts.split(rows):
            if len(batch) == rows:
                yield torch.stack(
                    [token_ids[start : start + context + 1] for start in batch]
                ).long()
