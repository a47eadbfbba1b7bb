"""Run by a launcher in each of its processes, see test_processes.py: trains into a folder."""

import sys
from contextlib import suppress
from pathlib import Path

import torch

from fastspec.cli import app
from fastspec.train.data import Rows
from fastspec.train.new_drafts import make_glide
from fastspec.train.options import TrainOptions
from fastspec.train.processes import OneProcess, many_processes
from fastspec.train.run import train_draft

from ..models import byte_tokenizer, random_model

NUM_STEPS = 6
TEXT = "the cat sat on the mat and the dog sat on the cat. " * 20


def train(
    processes: OneProcess, batch_size: int, out: Path, last: int = NUM_STEPS, resume: bool = False
) -> dict[str, float]:
    """Train a new draft on rows of unequal lengths, and give up after the step `last`."""

    def advance(num_steps: int, loss: float) -> None:
        if num_steps == last < NUM_STEPS:
            raise KeyboardInterrupt

    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(200, (16, 1), generator=generator)
    rows = Rows(starts + torch.arange(17), torch.randint(2, 18, (16,), generator=generator))
    target = random_model("llama")
    torch.manual_seed(last)  # weights that a continued run must not start from
    draft = make_glide(target, num_layers=2)
    options = TrainOptions(NUM_STEPS, batch_size, rate=2e-3, distillation=0.5, checkpoint_steps=2)
    return train_draft(target, draft, rows, options, out, processes, resume, advance)


def main(folder: Path) -> None:
    processes = many_processes()
    train(processes, 3, folder / f"whole_{processes.process_index}")
    with suppress(KeyboardInterrupt):
        train(processes, 3, folder / "broken", last=5)
    train(processes, 3, folder / "broken", resume=True)
    if processes.is_main_process:
        (folder / "text.txt").write_text(TEXT)
        random_model("llama").save_pretrained(folder / "target")
        byte_tokenizer().save_pretrained(folder / "target")
    processes.wait_for_everyone()
    files = ["--target", folder / "target", "--data", folder / "text.txt", "--out", folder / "cli"]
    sizes = ["--context", 32, "--batch-size", 4, "--held-out", 0.1]
    arguments = ["train", "glide", "--accelerate", *files, *sizes]
    app([*map(str, arguments)], standalone_mode=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
