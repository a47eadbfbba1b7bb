"""`fastspec train glide`: a GLIDE draft for a target of your own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar
from fastspec.cli.errors import quiet_libraries, usage_errors
from fastspec.cli.options import Flags, with_flags
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import require
from fastspec.config.files import parse_json_lines, read_text
from fastspec.train.options import TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 2**20  # of sizes; larger ones are mistakes


@with_flags
def glide(
    spec: Annotated[SpecConfig, Flags("num_speculative_tokens", method="draft_model")],
    settings: Annotated[TrainOptions, Flags(without=("steps",), steps=1)],
    config: Annotated[EngineConfig, Flags("dtype", "device", dtype="float32")],
    data: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help='UTF-8 text, or .jsonl with a "text" a line; repeatable.'
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Draft, checkpoints and record.")],
    target: options.Target = "tiny",
    layers: Annotated[int, typer.Option(max=_MOST, help="Layers of the draft.")] = 1,
    hidden_size: Annotated[
        int | None, typer.Option(max=_MOST, help="By default the target's.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(max=_MOST, help="By default the target's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="By default one pass over the data.")] = None,
    context: Annotated[int, typer.Option(max=_MOST, help="Tokens of a row.")] = 512,
    held_out: Annotated[
        float, typer.Option(help="Part of the rows that is held out, to judge the draft.")
    ] = 0.05,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Train a plain draft of the same size, for comparison.")
    ] = False,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="Several devices, under accelerate launch.")
    ] = False,
) -> None:
    """Train a GLIDE draft, which also reads the target's cache; the target stays as it is.

    At the end the draft is used on held-out text, and what was accepted is reported.
    """
    for file in data:
        if not file.is_file():
            raise typer.BadParameter(f"--data: no such file: {str(file)!r}")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out: expected a folder, {str(out)!r} is a file")
    if context < 2:
        raise typer.BadParameter(f"--context: expected an int >= 2, got {context}")
    if plain and settings.lookup_rows:
        raise typer.BadParameter("--lookup-rows: a --plain draft has no cross-attention")
    if accelerate and config.device != "auto":
        raise typer.BadParameter(f"--device: accelerate launch chooses it, got {config.device!r}")
    with usage_errors():
        require("held_out", held_out, 0 < held_out < 1, "a number between 0 and 1")
        if steps is not None:
            settings = replace(settings, steps=steps)
    quiet_libraries()
    import torch

    from fastspec.models.loading import load_model, load_tokenizer, resolve_device
    from fastspec.train.glide_data import cut_rows
    from fastspec.train.glide_run import (
        make_draft,
        one_epoch,
        report_acceptance,
        split_rows,
        train_draft,
    )
    from fastspec.train.processes import OneProcess, many_processes

    with usage_errors():
        processes = many_processes() if accelerate else OneProcess(resolve_device(config))
        config = replace(config, device=str(processes.device))
    tokenizer = load_tokenizer("target", target)
    model = load_model("target", target, config)
    if model.config.is_encoder_decoder:
        raise ValueError(f"target: expected a decoder, got {type(model).__name__}")
    rows = cut_rows(_documents(data, tokenizer), context)
    torch.manual_seed(settings.seed)
    with usage_errors():
        training, judging = split_rows(rows, held_out, settings.seed)
        draft = make_draft(model, layers, hidden_size, intermediate_size, plain)
    if steps is None:
        settings = replace(settings, steps=one_epoch(len(training), settings.batch_size, processes))
    with progress_bar("steps", live=processes.is_main_process) as bar:
        task = bar.add_task("training", total=settings.steps)

        def advance(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.3f}")

        record = train_draft(model, draft, training, settings, out, processes, resume, advance)
    if processes.is_main_process:
        tokenizer.save_pretrained(out)
        report = report_acceptance(model, draft, judging, spec, out)
        typer.echo(
            f"{out}: {record['steps']:.0f} steps, loss {record['train_loss']:.3f}; on held-out text"
            f" acceptance rate {number(report['acceptance_rate'])}, mean acceptance length"
            f" {number(report['mean_acceptance_length'])}"
            f" (K={spec.num_draft_tokens()}, {report['held_out_prompts']} prompts)"
        )


def _documents(files: list[Path], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Token ids of each text."""
    for file in files:
        content = read_text("data", file)
        is_jsonl = file.suffix == ".jsonl"
        texts = _records(content, f"data: {file}") if is_jsonl else [content]
        for text in texts:
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _records(content: str, source: str) -> Iterator[str]:
    """The field "text" of each line."""
    for where, record in parse_json_lines(content, source):
        if not isinstance(record, dict) or "text" not in record:
            raise ValueError(f'{where} has no field "text"')
        if not isinstance(record["text"], str):
            raise ValueError(f'{where}: "text" is not a text: {record["text"]!r}')
        yield record["text"]
