"""How long and how fast a draft is trained."""

import math
from dataclasses import MISSING, dataclass

from fastspec.config.options import BOOL, check_options, choice, documented, integer, number, option

_MOST = 2**20  # of sizes; larger ones are mistakes
_PART = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@documented
@dataclass(frozen=True)
class DraftShape:
    """The size of a draft, and the text that it is trained on."""

    layers: int = option(1, integer(1, _MOST), "Layers of the draft; few pay most.")
    hidden_size: int | None = option(
        None, integer(1, _MOST), "Width of the layers; by default the target's."
    )
    intermediate_size: int | None = option(
        None, integer(1, _MOST), "Width of the feed-forward blocks; by default the target's."
    )
    reduced_vocab_size: int | None = option(
        None,
        integer(1, _MOST),
        "Tokens that the draft can write, the most frequent ones of the data; by default all.",
        "Such a draft takes its embeddings and the rows of its head from the target and keeps its"
        " own weights in 8 bits: a small file, of use with this target alone.",
        flags=("--vocab-size",),
    )
    context: int = option(512, integer(2, _MOST), "Tokens of a row.")
    held_out: float = option(
        0.05,
        number("a number between 0 and 1", lambda value: 0 < value < 1),
        "Part of the rows that is held out, to judge the draft.",
    )

    def __post_init__(self):
        check_options(self)


@documented
@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast to train."""

    steps: int = option(MISSING, integer(1, None), "Optimizer steps.")
    batch_size: int = option(8, integer(1, _MOST), "Rows of each process in a step.")
    rate: float = option(
        5e-4,
        number("a number > 0", lambda value: value > 0),
        "Peak learning rate.",
        "After the warm-up it falls to 0 as a cosine does.",
    )
    warmup: float = option(0.025, _PART, "Part of the steps in which the rate rises, 0 to 1.")
    distillation: float = option(
        0.0, _PART, "Weight of the target's distribution against the text, 0 to 1."
    )
    optimizer: str = option(
        "adam",
        choice("adam", "muon"),
        "Of the layers' matrices; all else is trained by AdamW.",
        "Muon learns faster; it enlarges rounding, so that several processes do not end with the"
        " weights that one would.",
    )
    lookup_rows: int = option(
        0,
        integer(0, None),
        "Fit cross-attention to this many rows first, to copy; 0 does not.",
        "As `start_as_lookup` says, for a fresh GLIDE draft; a plain draft has none.",
    )
    store_target: bool = option(
        False,
        BOOL,
        "Run the target once over all rows and keep its final states on disk.",
        "Instead of at every step; it pays from the second pass over the data on.",
    )
    checkpoint_steps: int = option(200, integer(1, None), "Steps between checkpoints.")
    seed: int = option(0, integer(0, 2**63 - 1), "Seed of the weights and of the order of rows.")

    def __post_init__(self):
        check_options(self)

    def factor(self, step: int) -> float:
        """Learning rate of a step, counted from 0, as a part of its peak."""
        num_warmup = math.ceil(self.warmup * self.steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, self.steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
