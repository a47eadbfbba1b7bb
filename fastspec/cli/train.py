"""`fastspec train`: what drafters learn from your own text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar
from fastspec.cli.errors import check_can_write, quiet_libraries, usage_errors
from fastspec.cli.options import Flags, with_flags
from fastspec.cli.prompts import read_prompts
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import is_int
from fastspec.config.files import parse_json_lines, read_text
from fastspec.train.options import DraftShape, TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Data = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help='UTF-8 text, or .jsonl with a "text" a line, or "prompt_ids" and the "token_ids" after'
        " them; repeatable.",
    ),
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
_OF_GLIDE = ("steps", "lookup_rows", "distillation", "store_target")

app = typer.Typer(help="Make what drafters need from text of your own.", no_args_is_help=True)


@app.command()
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


@app.command()
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


@app.command()
@with_flags
def eagle3(
    shape: Annotated[DraftShape, Flags(without=("layers", "hidden_size"))],
    settings: Annotated[
        TrainOptions, Flags(without=_OF_GLIDE, steps=1, optimizer="muon", rate=2e-3)
    ],
    config: Annotated[EngineConfig, Flags("dtype", "device", dtype="bfloat16")],
    data: Data,
    out: Out,
    target: options.Target = "tiny",
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Start from the weights of this EAGLE-3 draft instead of fresh ones.",
        ),
    ] = None,
    steps: Steps = None,
    resume: Resume = False,
    plot: Plot = None,
) -> None:
    """Train an EAGLE-3 draft, which reads hidden states of the target; that stays as it is.

    The target reads all texts once, and its states are kept on disk meanwhile. Of "prompt_ids" and
    "token_ids" the latter alone are learnt. At the end it is reported what of a draft is accepted
    on held-out text.
    """
    settings = _checked(settings, steps, data, out, plot)
    sizes = {"--intermediate-size": shape.intermediate_size}
    sizes |= {"--vocab-size": shape.reduced_vocab_size}
    for flag, size in sizes.items():
        if start is not None and size is not None:
            raise typer.BadParameter(f"{flag}: not with --start, whose draft keeps its size")
    from fastspec.drafters.eagle3 import Eagle3Draft, load_eagle3
    from fastspec.train.eagle3 import cut_texts, make_eagle3, train_eagle3
    from fastspec.train.glide_data import split_places

    tokenizer, model = _load(target, config, settings.seed)
    texts = cut_texts(_documents(data, tokenizer, model), shape.context)
    with usage_errors():
        places = split_places(len(texts), shape.held_out, settings.seed)
        training, judging = ([texts[place] for place in part] for part in places)
        if start is None:
            draft = make_eagle3(model, training, shape)
        else:
            draft = load_eagle3(start, config, model).float()
            if not isinstance(draft, Eagle3Draft):
                raise ValueError("start: expected an EAGLE-3 draft, got one of EAGLE-1 or EAGLE-2")
    if steps is None:
        settings = replace(settings, steps=-(-len(training) // settings.batch_size))
    with _progress(settings.steps, len(texts)) as calls:
        record = train_eagle3(model, draft, training, judging, settings, out, resume, *calls)
    accepted = ", ".join(f"{part:.2f}" for part in record["greedy_acceptance"])
    report = f"the target takes of each draft token, if those before it were taken: {accepted}"
    _report(out, record, plot, report)


@app.command()
def bigram(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text files.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the table goes, as JSON.")],
    target: options.Target = "tiny",
) -> None:
    """Count which token follows which, and write the table that --method mag reads."""
    _check_files("FILE", files)
    check_can_write("--out", out)
    quiet_libraries()
    import numpy as np

    from fastspec.drafters.bigram_table import save_bigram
    from fastspec.models.loading import load_tokenizer
    from fastspec.train.bigram import count_bigrams

    tokenizer = load_tokenizer("target", target)
    with progress_bar("files") as bar:
        task = bar.add_task("counting", total=len(files))

        def documents() -> Iterator[np.ndarray]:
            for file in files:
                yield np.array(_ids(tokenizer, read_text("FILE", file)), dtype=np.int64)
                bar.advance(task)

        save_bigram(count_bigrams(documents(), len(tokenizer)), out)
    typer.echo(f"{out}: {len(tokenizer)} entries")


@app.command()
@with_flags
def texts(
    config: Annotated[EngineConfig, Flags("dtype", "device", "max_batch_size")],
    prompts_file: Annotated[
        Path, typer.Option(metavar="FILE", help="Prompts, read as generate does.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where the texts go.")],
    target: options.Target = "tiny",
    max_tokens: options.MaxTokens = 192,
) -> None:
    """Let a chat model answer prompts, for train draft and train glide to learn from.

    A run that was stopped goes on where it stopped.
    """
    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"--out: expected a .jsonl file, got {str(out)!r}")
    check_can_write("--out", out)
    prompts = read_prompts(prompts_file)
    quiet_libraries()
    from fastspec.engine.engine import Engine
    from fastspec.train.own_text import write_texts

    engine = Engine(target, config=config)
    with progress_bar("texts") as bar:
        task = bar.add_task("writing", total=len(prompts))
        with usage_errors():
            write_texts(
                engine, prompts, max_tokens, out, lambda done: bar.update(task, completed=done)
            )
    typer.echo(f"{out}: {len(prompts)} texts")


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
    """Train a draft of a kind that `glide_run.make_draft` names."""
    if accelerate and config.device != "auto":
        raise typer.BadParameter(f"--device: accelerate launch chooses it, got {config.device!r}")
    if accelerate and settings.store_target:
        raise typer.BadParameter("--store-target: not with --accelerate, as processes share a file")
    settings = _checked(settings, steps, data, out, plot)
    from fastspec.models.loading import resolve_device
    from fastspec.train import glide_run
    from fastspec.train.glide_data import cut_rows, split_places
    from fastspec.train.processes import OneProcess, many_processes

    with usage_errors():
        processes = many_processes() if accelerate else OneProcess(resolve_device(config))
        config = replace(config, device=str(processes.device))
    tokenizer, model = _load(target, config, settings.seed)
    rows = cut_rows((ids for ids, _ in _documents(data, tokenizer, model)), shape.context)
    with usage_errors():
        places = split_places(len(rows), shape.held_out, settings.seed)
        training, judging = map(rows.take, places)
        fresh = glide_run.make_draft(model, training, shape, kind)
    if steps is None:
        at_once = settings.batch_size * processes.num_processes
        settings = replace(settings, steps=-(-len(training) // at_once))
    with _progress(settings.steps, len(training), processes.is_main_process) as calls:
        record = glide_run.train_draft(
            model, fresh, training, settings, out, processes, resume, *calls
        )
    if not processes.is_main_process:
        return
    if shape.reduced_vocab_size is None:
        tokenizer.save_pretrained(out)
    found = glide_run.report_acceptance(model, judging, spec, out)
    rate, length = (number(found[name]) for name in ("acceptance_rate", "mean_acceptance_length"))
    told = f"K={spec.num_draft_tokens()}, {found['held_out_prompts']} prompts"
    report = f"acceptance rate {rate}, mean acceptance length {length} ({told})"
    _report(out, record, plot, report)


def _checked(
    settings: TrainOptions, steps: int | None, data: list[Path], out: Path, plot: Path | None
) -> TrainOptions:
    """Refuse what no training can use; the settings, with the steps that are asked for."""
    _check_files("--data", data)
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out: expected a folder, {str(out)!r} is a file")
    check_can_write("--plot", plot)
    with usage_errors():
        if plot is not None:
            from fastspec.tools.plots import require_plotting

            require_plotting()
        return settings if steps is None else replace(settings, steps=steps)


def _check_files(name: str, files: list[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise typer.BadParameter(f"{name}: no such file: {str(file)!r}")


def _load(
    target: str, config: EngineConfig, seed: int
) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """A target that a draft can learn from, and its tokenizer; then weights are drawn by a seed."""
    quiet_libraries()
    import torch

    from fastspec.models.loading import load_model, load_tokenizer

    tokenizer, model = load_tokenizer("target", target), load_model("target", target, config)
    if model.config.is_encoder_decoder:
        raise ValueError(f"target: expected a decoder, got {type(model).__name__}")
    torch.manual_seed(seed)
    return tokenizer, model


def _documents(
    files: list[Path], tokenizer: "PreTrainedTokenizerBase", target: "PreTrainedModel"
) -> Iterator[tuple[list[int], int]]:
    """Token ids of each text, and where what is learnt of it begins."""
    vocab_size: int = target.config.get_text_config(decoder=True).vocab_size
    for file in files:
        content = read_text("data", file)
        if file.suffix != ".jsonl":
            yield _ids(tokenizer, content), 1
            continue
        for where, record in parse_json_lines(content, f"data: {file}"):
            fields = record if isinstance(record, dict) else {}
            if "text" in fields:
                if not isinstance(fields["text"], str):
                    raise ValueError(f'{where}: "text" is not a text: {fields["text"]!r}')
                yield _ids(tokenizer, fields["text"]), 1
                continue
            for name in ("prompt_ids", "token_ids"):
                ids = fields.get(name)
                if not isinstance(ids, list) or not all(
                    is_int(i) and 0 <= i < vocab_size for i in ids
                ):
                    given = f"{name} is {ids!r:.40}"
                    raise ValueError(f'{where} has no field "text", and no lists of ids: {given}')
            yield [*fields["prompt_ids"], *fields["token_ids"]], len(fields["prompt_ids"])


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@contextmanager
def _progress(
    num_steps: int, num_texts: int, live: bool = True
) -> Iterator[tuple[Callable[[int, float], None], Callable[[int], None]]]:
    """What to call after each step of training, and while the target reads the texts before."""
    with progress_bar("steps", live) as bar:
        task = bar.add_task("training", total=num_steps)
        yield (
            lambda done, loss: bar.update(task, completed=done, description=f"loss {loss:.3f}"),
            lambda done: bar.update(task, description=f"target: text {done} of {num_texts}"),
        )


def _report(out: Path, record: dict[str, Any], plot: Path | None, found: str) -> None:
    """What training has come to."""
    if plot is not None:
        from fastspec.tools.plots import plot_loss

        plot_loss(record["losses"], plot)
    told = f"{record['steps']:.0f} steps, loss {record['train_loss']:.3f}"
    typer.echo(f"{out}: {told}; on held-out text {found}")
