"""How long and how fast a draft is trained."""

import math
from dataclasses import dataclass

from fastspec.config.checks import is_int, require


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast to train.

    Args:
        steps: optimizer steps, >= 1.
        batch_size: rows of each process in a step, >= 1.
        rate: peak learning rate; after the warm-up it falls to 0 as a cosine does.
        warmup: part of the steps in which the rate rises, from 0 to 1.
        distillation: weight of the target's distribution against the text's own next token, 0 to 1.
        lookup_rows: rows to which the cross-attention of a fresh GLIDE draft is fitted at first, as
            `start_as_lookup` says; 0 leaves it as it is. A plain draft has none.
        checkpoint_steps: steps between checkpoints, >= 1.
        seed: of the order of the rows.
    Raises:
        ValueError: a value out of range.
    """

    steps: int
    batch_size: int = 8
    rate: float = 5e-4
    warmup: float = 0.025
    distillation: float = 0.0
    lookup_rows: int = 0
    checkpoint_steps: int = 200
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "checkpoint_steps"):
            value = getattr(self, name)
            require(name, value, is_int(value) and value >= 1, "an int >= 1")
        rows = self.lookup_rows
        require("lookup_rows", rows, is_int(rows) and rows >= 0, "an int >= 0")
        require("rate", self.rate, 0 < self.rate < math.inf, "a number > 0")
        for name in ("warmup", "distillation"):
            value = getattr(self, name)
            require(name, value, 0 <= value <= 1, "a number from 0 to 1")

    def factor(self, step: int) -> float:
        """Learning rate of a step, counted from 0, as a part of its peak."""
        num_warmup = math.ceil(self.warmup * self.steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, self.steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
