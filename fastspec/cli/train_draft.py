"""`fastspec train draft` and `glide`: a draft for a target of your own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar
from fastspec.cli.errors import check_can_write, quiet_libraries, usage_errors
from fastspec.cli.options import Flags, with_flags
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.files import parse_json_lines, read_text
from fastspec.train.options import DraftShape, TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Data = Annotated[
    list[Path],
    typer.Option(metavar="FILE", help='UTF-8 text, or .jsonl with a "text" a line; repeatable.'),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Draft, checkpoints and record.")]
Steps = Annotated[int | None, typer.Option(help="By default one pass over the data.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the loss of each step (extra [plot]).")
]
Accelerate = Annotated[
    bool, typer.Option("--accelerate", help="Several devices, under accelerate launch.")
]
_Spec = Annotated[SpecConfig, Flags("num_speculative_tokens", method="draft_model")]
_Config = Annotated[EngineConfig, Flags("dtype", "device", dtype="float32")]


@with_flags
def draft(
    spec: _Spec,
    shape: Annotated[DraftShape, Flags()],
    settings: Annotated[
        TrainOptions,
        Flags(without=("steps", "lookup_rows"), steps=1, distillation=1.0, optimizer="muon"),
    ],
    config: _Config,
    data: Data,
    out: Out,
    target: options.Target = "tiny",
    steps: Steps = None,
    resume: Resume = False,
    plot: Plot = None,
    accelerate: Accelerate = False,
) -> None:
    """Train a shallow draft model, which starts from the target's first and last layers.

    Best on text of the target's own, which train texts writes. At the end the draft is used on
    held-out text, and what was accepted is reported.
    """
    run = target, steps, resume, plot, accelerate
    _train("draft", spec, shape, settings, config, data, out, *run)


@with_flags
def glide(
    spec: _Spec,
    shape: Annotated[DraftShape, Flags()],
    settings: Annotated[TrainOptions, Flags(without=("steps",), steps=1)],
    config: _Config,
    data: Data,
    out: Out,
    target: options.Target = "tiny",
    steps: Steps = None,
    resume: Resume = False,
    plot: Plot = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Train a plain draft of the same size, for comparison.")
    ] = False,
    accelerate: Accelerate = False,
) -> None:
    """Train a GLIDE draft, which also reads the target's cache; the target stays as it is.

    At the end the draft is used on held-out text, and what was accepted is reported.
    """
    if plain and settings.lookup_rows:
        raise typer.BadParameter("--lookup-rows: a --plain draft has no cross-attention")
    kind = "plain" if plain else "glide"
    run = target, steps, resume, plot, accelerate
    _train(kind, spec, shape, settings, config, data, out, *run)


def _train(
    kind: str,
    spec: SpecConfig,
    shape: DraftShape,
    settings: TrainOptions,
    config: EngineConfig,
    data: list[Path],
    out: Path,
    target: str,
    steps: int | None,
    resume: bool,
    plot: Path | None,
    accelerate: bool,
) -> None:
    check_files(data, out)
    if accelerate and config.device != "auto":
        raise typer.BadParameter(f"--device: accelerate launch chooses it, got {config.device!r}")
    if accelerate and settings.store_target:
        raise typer.BadParameter("--store-target: not with --accelerate, as processes share a file")
    check_can_write("--plot", plot)
    from fastspec.tools.plots import plot_loss, require_plotting

    with usage_errors():
        if plot is not None:
            require_plotting()
        if steps is not None:
            settings = replace(settings, steps=steps)
    quiet_libraries()
    import torch

    from fastspec.models.loading import load_model, load_tokenizer, resolve_device
    from fastspec.train import glide_run
    from fastspec.train.glide_data import cut_rows
    from fastspec.train.processes import OneProcess, many_processes

    with usage_errors():
        processes = many_processes() if accelerate else OneProcess(resolve_device(config))
        config = replace(config, device=str(processes.device))
    tokenizer = load_tokenizer("target", target)
    model = load_model("target", target, config)
    if model.config.is_encoder_decoder:
        raise ValueError(f"target: expected a decoder, got {type(model).__name__}")
    rows = cut_rows(_documents(data, tokenizer), shape.context)
    torch.manual_seed(settings.seed)
    with usage_errors():
        training, judging = glide_run.split_rows(rows, shape.held_out, settings.seed)
        fresh = glide_run.make_draft(model, training, shape, kind)
    if steps is None:
        num_steps = glide_run.one_epoch(len(training), settings.batch_size, processes)
        settings = replace(settings, steps=num_steps)
    with progress_bar("steps", live=processes.is_main_process) as bar:
        task = bar.add_task("training", total=settings.steps)

        def advance(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.3f}")

        def on_row(done: int) -> None:
            bar.update(task, description=f"target: row {done} of {len(training)}")

        record = glide_run.train_draft(
            model, fresh, training, settings, out, processes, resume, advance, on_row
        )
    if processes.is_main_process:
        if shape.reduced_vocab_size is None:
            tokenizer.save_pretrained(out)
        if plot is not None:
            plot_loss(record["losses"], plot)
        report = glide_run.report_acceptance(model, judging, spec, out)
        typer.echo(
            f"{out}: {record['steps']:.0f} steps, loss {record['train_loss']:.3f}; on held-out text"
            f" acceptance rate {number(report['acceptance_rate'])}, mean acceptance length"
            f" {number(report['mean_acceptance_length'])}"
            f" (K={spec.num_draft_tokens()}, {report['held_out_prompts']} prompts)"
        )


def check_files(data: list[Path], out: Path) -> None:
    """Refuse --data that is not there, and an --out that is no folder."""
    for file in data:
        if not file.is_file():
            raise typer.BadParameter(f"--data: no such file: {str(file)!r}")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out: expected a folder, {str(out)!r} is a file")


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
