"""The data, shape and training options of a draft."""

import math
from dataclasses import MISSING, dataclass
from pathlib import Path

from fastspec.config.checks import require
from fastspec.config.files import check_can_write, refuse_inputs, require_file
from fastspec.config.options import (
    BOOL,
    PATH,
    Kind,
    Options,
    choice,
    documented,
    integer,
    listed,
    number,
    option,
)
from fastspec.tools.plots import require_plotting

_MOST = 2**20  # of sizes; larger ones are mistakes
_PART = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_FILES = Kind("files", lambda value: isinstance(value, (list, tuple)), tuple, list[Path])


@documented
@dataclass(frozen=True)
class TrainFiles(Options):
    """The files that a run reads and writes."""

    data: tuple[Path, ...] = option(
        MISSING,
        _FILES,
        'Training data: UTF-8 text, or .jsonl with "text", or with "prompt_ids" and the following'
        ' "token_ids", on each line; repeatable.',
        metavar="FILE",
    )
    out: Path = option(MISSING, PATH, "Folder for draft, checkpoints and record.", metavar="DIR")
    resume: bool = option(False, BOOL, "Continue from the checkpoint.")
    plot: Path | None = option(
        None, PATH, "Plot the loss of each step; needs matplotlib.", metavar="FILE"
    )
    accelerate: bool = option(False, BOOL, "Train on several devices, under accelerate launch.")

    def __post_init__(self):
        super().__post_init__()
        for file in self.data:
            require_file("data", file)
        fits = self.out.is_dir() or not self.out.exists()
        require("out", str(self.out), fits, "a folder, not a file")
        if self.plot is not None:
            check_can_write("plot", self.plot)
            refuse_inputs("plot", self.plot, self.data)
            require_plotting(self.plot)


@documented
@dataclass(frozen=True)
class DraftShape(Options):
    """The size of a draft and of the rows that it is trained on."""

    layers: int = option(1, integer(1, _MOST), "Number of layers; few usually pay off most.")
    hidden_size: int | None = option(
        None, integer(1, _MOST), "Width of the layers; by default the target's."
    )
    intermediate_size: int | None = option(
        None, integer(1, _MOST), "Width of the feed-forward blocks; by default the target's."
    )
    reduced_vocab_size: int | None = option(
        None,
        integer(1, _MOST),
        "Number of tokens that the draft can write, the most frequent in the data; by default all.",
        "Such a draft takes its embeddings and the rows of its head from the target and stores its"
        " own weights in 8 bits: a small file that works only with this target.",
        flags=("--vocab-size",),
    )
    context: int = option(
        512,
        integer(2, _MOST),
        "Number of tokens per row; 512 becomes the target's positions where these are fewer.",
    )
    held_out: float = option(
        0.05,
        number("a number between 0 and 1", lambda value: 0 < value < 1),
        "Fraction of the tokens to hold out for evaluating the draft; at least a row, or half if"
        " there are fewer than two.",
    )


_SIZES = listed("numbers like 1,2", integer(1, _MOST))


@documented
@dataclass(frozen=True)
class ShapesTried(Options):
    """The sizes of drafts to time before one is trained."""

    layers: tuple[int, ...] | None = option(
        None, _SIZES, "Comma-separated layer counts; by default 1, 2 and 4.", metavar="N,..."
    )
    hidden_sizes: tuple[int, ...] | None = option(
        None,
        _SIZES,
        "Comma-separated widths, with the whole vocabulary; by default the target's.",
        "A reduced vocabulary uses the target's embeddings, and so its width.",
        metavar="N,...",
    )
    vocab_sizes: tuple[int, ...] | None = option(
        None,
        _SIZES,
        "Comma-separated sizes of reduced vocabularies, besides the whole one; by default 8192.",
        metavar="N,...",
    )


@documented
@dataclass(frozen=True)
class TrainOptions(Options):
    """How long and how fast to train."""

    steps: int | None = option(
        None, integer(1, None), "Number of optimizer steps; by default one pass over the data."
    )
    batch_size: int = option(8, integer(1, _MOST), "Number of rows per process in each step.")
    rate: float = option(
        5e-4,
        number("a number > 0", lambda value: value > 0),
        "Peak learning rate.",
        "After the warm-up it falls to 0 along a cosine.",
    )
    warmup: float = option(0.025, _PART, "Fraction of the steps in which the rate rises, 0 to 1.")
    distillation: float = option(
        0.0, _PART, "Weight of the target's distribution versus the text, 0 to 1."
    )
    acceptance: float = option(
        0.0,
        _PART,
        "Weight of the acceptance at temperature 1 versus the whole distribution, 0 to 1.",
        "Part of the loss is then -log of the sum of min(draft, target) over all tokens.",
    )
    optimizer: str = option(
        "adam",
        choice("adam", "muon"),
        "Optimizer for the layers' matrices; everything else is trained with AdamW.",
        "Muon learns faster, but amplifies rounding, so several processes do not end with the same"
        " weights as one.",
    )
    lookup_rows: int = option(
        0,
        integer(0, None),
        "Fit the cross-attention to copy on this many rows first; 0 is off.",
        "See `start_as_lookup`; for a fresh GLIDE draft, as a plain draft has no cross-attention.",
    )
    store_target: bool = option(
        False,
        BOOL,
        "Run the target once over all rows and keep its final states on disk.",
        "Instead of at every step; it pays off from the second pass over the data on.",
    )
    checkpoint_steps: int = option(200, integer(1, None), "Steps between checkpoints.")
    seed: int = option(0, integer(0, 2**63 - 1), "Seed for the weights and the order of rows.")

    def num_steps(self, num_rows: int, num_processes: int = 1) -> int:
        """Number of steps of a run over this many rows."""
        return self.steps or -(-num_rows // (self.batch_size * num_processes))

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, counted from 0, as a fraction of its peak."""
        num_warmup = math.ceil(self.warmup * num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
