"""What a draft is trained on, how long and how fast."""

import math
from dataclasses import MISSING, dataclass
from pathlib import Path

from fastspec.config.checks import require
from fastspec.config.files import check_can_write, require_file
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
    """What a run reads and writes."""

    data: tuple[Path, ...] = option(
        MISSING,
        _FILES,
        'UTF-8 text, or .jsonl with a "text" a line, or "prompt_ids" and the "token_ids" after'
        " them; repeatable.",
        metavar="FILE",
    )
    out: Path = option(MISSING, PATH, "Draft, checkpoints and record.", metavar="DIR")
    resume: bool = option(False, BOOL, "Continue from the checkpoint.")
    plot: Path | None = option(
        None, PATH, "Draw the loss of each step (extra [plot]).", metavar="FILE"
    )
    accelerate: bool = option(False, BOOL, "Several devices, under accelerate launch.")

    def __post_init__(self):
        super().__post_init__()
        for file in self.data:
            require_file("data", file)
        fits = self.out.is_dir() or not self.out.exists()
        require("out", str(self.out), fits, "a folder, not a file")
        if self.plot is not None:
            check_can_write("plot", self.plot)
            require_plotting()


@documented
@dataclass(frozen=True)
class DraftShape(Options):
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


_SIZES = listed("numbers like 1,2", integer(1, _MOST))


@documented
@dataclass(frozen=True)
class ShapesTried(Options):
    """Which sizes of drafts are timed before one is trained."""

    layers: tuple[int, ...] | None = option(
        None, _SIZES, "Comma-separated numbers of layers; by default 1, 2 and 4.", metavar="N,..."
    )
    hidden_sizes: tuple[int, ...] | None = option(
        None,
        _SIZES,
        "Comma-separated widths, with the whole vocabulary; by default the target's.",
        "A reduced vocabulary takes the target's embeddings, and its width.",
        metavar="N,...",
    )
    vocab_sizes: tuple[int, ...] | None = option(
        None,
        _SIZES,
        "Comma-separated sizes of reduced vocabularies, beside the whole one; by default 8192.",
        metavar="N,...",
    )


@documented
@dataclass(frozen=True)
class TrainOptions(Options):
    """How long and how fast to train."""

    steps: int | None = option(
        None, integer(1, None), "Optimizer steps; by default one pass over the data."
    )
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
    acceptance: float = option(
        0.0,
        _PART,
        "Weight of what is accepted at temperature 1 against the whole distribution, 0 to 1.",
        "The loss is then in part -log of the sum of min(draft, target) over all tokens.",
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

    def num_steps(self, num_rows: int, num_processes: int = 1) -> int:
        """Steps of a run over so many rows."""
        return self.steps or -(-num_rows // (self.batch_size * num_processes))

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, counted from 0, as a part of its peak."""
        num_warmup = math.ceil(self.warmup * num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
