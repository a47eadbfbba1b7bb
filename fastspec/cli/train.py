"""`fastspec train`: train drafters on your own text."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastspec.cli.display import counted, number, progress_bar, table_of
from fastspec.cli.errors import begin, usage_errors
from fastspec.cli.help import SectionedHelp, WholeSummaries
from fastspec.cli.options import FIXED_RUN, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions, tokenize_prompts, usual_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import is_int, refuse, require, require_unicode
from fastspec.config.files import parse_json_lines, read_text, require_file, writing
from fastspec.config.k_matrix import MAX_DRAFT_TOKENS
from fastspec.tools.settings import Models
from fastspec.train.options import DraftShape, ShapesTried, TrainFiles, TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Target = Annotated[Models, Flags("target")]
_Spec = Annotated[SpecConfig, Flags("num_speculative_tokens")]
_Config = Annotated[EngineConfig, Flags("dtype", "device", dtype="float32")]
_SECONDS_BETWEEN_LINES = 60.0
_PROMPTS = 4  # of a data set or the bundled set, for shapes
_NOT_FOR_STATE_READERS = ("lookup_rows", "distillation", "store_target")

app = typer.Typer(cls=WholeSummaries, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def train(context: typer.Context) -> None:
    """Train drafters on your own text."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(cls=SectionedHelp)
@command
def draft(
    models: _Target,
    files: Annotated[TrainFiles, Flags()],
    shape: Annotated[DraftShape, Flags()],
    settings: Annotated[
        TrainOptions,
        Flags(without=("lookup_rows", "acceptance"), distillation=1.0, optimizer="muon"),
    ],
    config: _Config,
    spec: _Spec,
) -> None:
    """Train a shallow draft model, which starts from the target's first and last layers.

    It works best on the target's own text, which train texts writes. At the end the draft is run on
    held-out text and its acceptance is reported.
    """
    _train("plain", models.target, files, shape, settings, config, spec)


@app.command(cls=SectionedHelp)
@command
def glide(
    models: _Target,
    files: Annotated[TrainFiles, Flags()],
    shape: Annotated[DraftShape, Flags()],
    settings: Annotated[TrainOptions, Flags(without=("acceptance",))],
    config: _Config,
    spec: _Spec,
    plain: Annotated[
        bool, typer.Option("--plain", help="Train a plain draft of the same size, for comparison.")
    ] = False,
) -> None:
    """Train a GLIDE draft, which also reads the target's cache; the target is not changed.

    At the end the draft is run on held-out text and its acceptance is reported.
    """
    if plain and settings.lookup_rows:
        raise ValueError("lookup_rows: a --plain draft has no cross-attention")
    kind = "matched" if plain else "glide"
    _train(kind, models.target, files, shape, settings, config, spec)


@app.command(cls=SectionedHelp)
@command
def eagle3(
    models: _Target,
    files: Annotated[TrainFiles, Flags(without=("accelerate",))],
    shape: Annotated[DraftShape, Flags(without=("layers", "hidden_size"))],
    settings: Annotated[
        TrainOptions, Flags(without=_NOT_FOR_STATE_READERS, optimizer="muon", rate=2e-3)
    ],
    config: Annotated[EngineConfig, Flags("dtype", "device", dtype="bfloat16")],
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Start from the weights of this EAGLE-3 draft instead of fresh ones; repeat it to"
            " resume.",
        ),
    ] = None,
) -> None:
    """Train an EAGLE-3 draft, which reads hidden states of the target; the target is not changed.

    The target reads all texts once, and its states are kept on disk during training. Of
    "prompt_ids" and "token_ids", only the latter are learnt. At the end the acceptance of drafts on
    held-out text is reported.
    """
    for name in ("intermediate_size", "reduced_vocab_size") if start is not None else ():
        refuse(name, getattr(shape, name), "not with --start, which keeps the size of its draft")
    begin()
    from fastspec.drafters.eagle3 import Eagle3Draft, load_eagle
    from fastspec.train.eagle3 import Eagle3Trainer, make_eagle3

    def make(model: Any, texts: Any, shape: DraftShape) -> Any:
        if start is None:
            return make_eagle3(model, texts, shape)
        draft = load_eagle(start, config, model).float()
        if not isinstance(draft, Eagle3Draft):
            raise ValueError("start: expected an EAGLE-3 draft, got EAGLE-1 or EAGLE-2")
        return draft

    _train_on_states(Eagle3Trainer, make, models, files, shape, settings, config)


@app.command(cls=SectionedHelp)
@command
def dflash(
    models: _Target,
    files: Annotated[TrainFiles, Flags(without=("accelerate",))],
    shape: Annotated[DraftShape, Flags(without=("hidden_size",))],
    settings: Annotated[
        TrainOptions, Flags(without=_NOT_FOR_STATE_READERS, optimizer="muon", rate=2e-3)
    ],
    config: Annotated[EngineConfig, Flags("dtype", "device", dtype="bfloat16")],
    block_size: Annotated[
        int,
        typer.Option(
            min=2,
            max=MAX_DRAFT_TOKENS,
            help="Tokens of a block; a draft has at most one fewer.",
        ),
    ] = 8,
) -> None:
    """Train a DFlash draft, which guesses a block of tokens in one pass.

    It reads hidden states of the target, which is not changed. The target reads all texts once, and
    its states are kept on disk during training. Of "prompt_ids" and "token_ids", only the latter
    are learnt. At the end the acceptance of drafts on held-out text is reported.
    """
    begin()
    from fastspec.train.dflash import DFlashTrainer, make_dflash

    make = partial(make_dflash, block_size=block_size)
    _train_on_states(DFlashTrainer, make, models, files, shape, settings, config)


def _train_on_states(
    kind: Any,
    make: Callable[..., Any],
    models: _Target,
    files: TrainFiles,
    shape: DraftShape,
    settings: TrainOptions,
    config: EngineConfig,
) -> None:
    """Train a draft that reads hidden states; `make` makes it, for a target, texts and a shape."""
    from fastspec.train.data import split_documents
    from fastspec.train.states import cut_texts, train_on_states

    tokenizer, model = _load(models.target, config, settings.seed)
    shape = _fitting(shape, model)
    documents = _documents(files.data, tokenizer, _vocab_size(model))
    parts = split_documents(documents, shape.held_out, shape.context, settings.seed)
    training, held_out = (cut_texts(part, shape.context) for part in parts)
    with usage_errors():
        draft = make(model, training, shape)
    num_texts = len(training) + len(held_out)
    with _progress(settings.num_steps(len(training)), num_texts) as calls:
        run = settings, files.out, files.resume
        record = train_on_states(kind, model, draft, training, held_out, *run, *calls, shape)
    accepted = ", ".join(f"{part:.2f}" for part in record["greedy_acceptance"])
    report = f"acceptance rate at each position, after the text's own tokens: {accepted}"
    _report(files, record, report)


@app.command(cls=SectionedHelp)
@command
def bigram(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="UTF-8 text files, or .jsonl files of records as in train draft.",
        ),
    ],
    out: Annotated[Path, output_file("JSON file for the table.")],
    models: _Target,
) -> None:
    """Count which token follows which, and write the table that --method mag reads."""
    for file in files:
        require_file("files", file)
    begin()
    import numpy as np

    from fastspec.drafters.bigram_table import save_bigram
    from fastspec.models.loading import load_tokenizer
    from fastspec.train.bigram import count_bigrams

    tokenizer = load_tokenizer("target", models.target)
    with progress_bar("files") as bar:
        task = bar.add_task("counting", total=len(files))

        def documents() -> Iterator[np.ndarray]:
            for file in files:
                for ids, _ in _documents([file], tokenizer, len(tokenizer), "FILE"):
                    yield np.array(ids, dtype=np.int64)
                bar.advance(task)

        successors = count_bigrams(documents(), len(tokenizer))
    with writing("out", out):
        save_bigram(successors, out)
    typer.echo(f"{out}: {len(tokenizer)} entries")


@app.command(cls=SectionedHelp)
@command
def texts(
    models: Annotated[Models, Flags("target", "chat_template")],
    config: Annotated[EngineConfig, Flags("dtype", "device", "max_batch_size")],
    prompts: Annotated[PromptOptions, Flags("prompts_file")],
    params: Annotated[SamplingParams, Flags("max_tokens", max_tokens=192)],
    out: Annotated[Path, output_file("File for the texts.", "FILE.jsonl")],
) -> None:
    """Let a chat model answer prompts, as data for the other train commands.

    Texts are kept in FILE.jsonl.part until all are done: rerun the same command to continue.
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"out: expected a .jsonl file, got {str(out)!r}")
    if out.exists():
        raise ValueError(f"out: expected a file that does not exist yet, got {str(out)!r}")
    written = prompts.named()
    if not written:
        raise ValueError("prompts_file: required, as texts answers its prompts")
    begin()
    from fastspec.train.own_text import write_texts

    engine = models.engine(SpecConfig(), config)
    with progress_bar("texts") as bar, usage_errors():
        task = bar.add_task("writing", total=len(written))
        most = params.max_tokens or 0
        given = models.target, written, most, out
        write_texts(engine, *given, lambda done: bar.update(task, completed=done))
    typer.echo(f"{out}: {counted(len(written), 'text')}")


@app.command(cls=SectionedHelp)
@command
def shapes(
    models: Annotated[Models, Flags("target", "threads", "chat_template")],
    tried: Annotated[ShapesTried, Flags()],
    config: Annotated[EngineConfig, Flags("dtype", "device")],
    prompts: Annotated[PromptOptions, Flags(shown=usual_prompts(_PROMPTS))],
    params: Annotated[SamplingParams, Flags("max_tokens", **FIXED_RUN)],
    spec: _Spec,
    glide: Annotated[
        bool, typer.Option("--glide", help="Time GLIDE drafts instead of plain ones.")
    ] = False,
) -> None:
    """Time fresh drafts of several shapes, and show how good each must be to pay off.

    None is trained: a draft costs the same whatever it proposes. From the costs, tune's throughput
    model predicts the acceptance rates at which a shape pays off.
    """
    prompts.check_template(models)
    max_tokens, texts = params.max_tokens or 0, prompts.or_bundled(_PROMPTS)
    begin()
    from fastspec.tools.tune import Planner
    from fastspec.train.shapes import shapes_of, untrained

    models.use_threads()
    tokenizer, model = _load(models.target, config, 0)
    models.use_template(tokenizer)
    ids = tokenize_prompts(tokenizer, texts, prompts.chat)
    kind, method = ("glide", "glide") if glide else ("plain", "draft_model")
    spec = replace(spec, method=method)
    gains = {"1x, even": 1.0, "1.5x": 1.5, "2x": 2.0}
    table = table_of("draft ms", "cost", *gains, label="draft", no_wrap=True)
    with progress_bar("runs") as bar, usage_errors():
        if sum(map(len, ids)) < 2:
            raise ValueError("prompts: expected at least one with two or more tokens")
        sizes = shapes_of(model, tried)
        task = bar.add_task("timing", total=len(sizes) * len(ids))
        planner = Planner(
            model, tokenizer, ids, max_tokens, config=config, advance=lambda: bar.advance(task)
        )
        for shape in sizes:
            draft = untrained(model, shape, kind, ids)
            costs, _ = planner.measure_costs(spec, draft)
            cost = costs.draft_cost()
            found = (costs.rate_for(gain, max_tokens) for gain in gains.values())
            cells = ("-" if each is None else f"{each[0]:.2f} (K={each[1]})" for each in found)
            time = number(1000 * cost * costs.step_seconds(0))
            table.add_row(_label(shape), time, number(cost), *cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "cost: of a draft token, in steps of plain decoding. Then, for three speed-ups, the rate at"
        " which the target must accept a draft token whose predecessors were accepted, and the best"
        " K."
    )


def _label(shape: DraftShape) -> str:
    parts = [counted(shape.layers, "layer")]
    if shape.hidden_size is not None:
        parts.append(f"width {shape.hidden_size}")
    if shape.reduced_vocab_size is not None:
        parts.append(f"{shape.reduced_vocab_size} tokens")
    return ", ".join(parts)


def _train(
    kind: str,
    target: str,
    files: TrainFiles,
    shape: DraftShape,
    settings: TrainOptions,
    config: EngineConfig,
    spec: SpecConfig,
) -> None:
    """Train a draft of a kind that `new_drafts.make_draft` names."""
    if files.accelerate and config.device != "auto":
        raise ValueError(f"device: accelerate launch chooses it, got {config.device!r}")
    if files.accelerate and settings.store_target:
        raise ValueError("store_target: not with --accelerate, whose processes would share a file")
    begin()
    from fastspec.models.loading import resolve_device
    from fastspec.train.data import cut_rows, split_documents
    from fastspec.train.new_drafts import make_draft
    from fastspec.train.processes import OneProcess, many_processes
    from fastspec.train.run import report_acceptance, train_draft

    with usage_errors():
        processes = many_processes() if files.accelerate else OneProcess(resolve_device(config))
        config = replace(config, device=str(processes.device))
    tokenizer, model = _load(target, config, settings.seed)
    shape = _fitting(shape, model)
    documents = _documents(files.data, tokenizer, _vocab_size(model))
    parts = split_documents(documents, shape.held_out, shape.context, settings.seed)
    training, held_out = (cut_rows((ids for ids, _ in part), shape.context) for part in parts)
    with usage_errors():
        fresh = make_draft(model, training, shape, kind)
    num_steps = settings.num_steps(len(training), processes.num_processes)
    with _progress(num_steps, len(training), processes.is_main_process) as calls:
        run = settings, files.out, processes, files.resume
        record = train_draft(model, fresh, training, *run, *calls, shape)
    processes.end_training()  # gloo's threads may abort a process that exits within the group
    if not processes.is_main_process:
        return
    if shape.reduced_vocab_size is None:
        tokenizer.save_pretrained(files.out)
    found = report_acceptance(model, held_out, spec, files.out)
    rate, length = (number(found[name]) for name in ("acceptance_rate", "mean_acceptance_length"))
    told = f"K={spec.num_draft_tokens()}, {counted(int(found['held_out_prompts']), 'prompt')}"
    _report(files, record, f"acceptance rate {rate}, mean acceptance length {length} ({told})")


def _load(
    target: str, config: EngineConfig, seed: int
) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """A target that a draft can learn from, and its tokenizer; then sets the seed for weights."""
    import torch

    from fastspec.models.loading import load_model, load_tokenizer

    tokenizer, model = load_tokenizer("target", target), load_model("target", target, config)
    if model.config.is_encoder_decoder:
        raise ValueError(f"target: expected a decoder, got {type(model).__name__}")
    torch.manual_seed(seed)
    return tokenizer, model


def _fitting(shape: DraftShape, target: "PreTrainedModel") -> DraftShape:
    """The shape with rows that the target has positions for: the usual length is lowered, another
    that is too long is refused."""
    config = target.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if most is None or shape.context <= most:
        return shape
    expected = f"at most {most}, the target's positions"
    require("context", shape.context, shape.context == DraftShape().context, expected)
    return replace(shape, context=most)


def _vocab_size(target: "PreTrainedModel") -> int:
    return target.config.get_text_config(decoder=True).vocab_size


def _documents(
    files: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    field: str = "data",
) -> Iterator[tuple[list[int], int]]:
    """Token ids of each text, and where the part to learn begins; `field` begins errors."""
    first = tokenizer("")["input_ids"][:1]
    begin = first if first == [tokenizer.bos_token_id] else []

    def ids_of(text: str) -> list[int]:
        """They begin as the engine's prompts do, with the tokenizer's first token, if any."""
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids if ids[:1] == begin else [*begin, *ids]

    for file in files:
        content = read_text(field, file)
        if file.suffix != ".jsonl":
            yield ids_of(content), 1
            continue
        for where, record in parse_json_lines(content, f"{field}: {file}"):
            is_record = isinstance(record, dict)
            require(where, record, is_record, 'an object with "text" or lists of ids')
            if "text" in record and "prompt_ids" not in record:
                if not isinstance(record["text"], str):
                    raise ValueError(f'{where}: "text" is not a string: {record["text"]!r}')
                if asked := {"prompt", "messages"} & record.keys():
                    raise ValueError(
                        f'{where}: "text" is an answer to its {asked.pop()}, which would be left'
                        ' out; give whole texts, or "prompt_ids" and "token_ids", as train texts'
                        " writes"
                    )
                require_unicode(where, record["text"])
                yield ids_of(record["text"]), 1
                continue
            for name in ("prompt_ids", "token_ids"):
                ids = record.get(name)
                if not isinstance(ids, list) or not all(map(is_int, ids)):
                    given = f"{name} is {ids!r:.40}"
                    raise ValueError(f'{where} has neither "text" nor lists of ids: {given}')
                for token_id in ids:
                    fits = 0 <= token_id < vocab_size
                    require(f"{where}: {name}", token_id, fits, f"ids in 0..{vocab_size - 1}")
            whole = [*record["prompt_ids"], *record["token_ids"]]
            if record.get("text", told := tokenizer.decode(whole)) != told:
                raise ValueError(
                    f'{where}: "text" is not that of the ids, which are of another tokenizer'
                )
            yield whole, len(record["prompt_ids"])


@contextmanager
def _progress(
    num_steps: int, num_texts: int, live: bool = True
) -> Iterator[tuple[Callable[[int, float], None], Callable[[int], None]]]:
    """Callbacks for each step of training, and for each text that the target reads before.

    Shows a bar on a terminal; elsewhere, as in a log, a line on stderr now and then.
    """
    told = time.monotonic()
    with progress_bar("steps", live) as bar:
        task = bar.add_task("training", total=num_steps)

        def tell(text: str, done: int | None = None) -> None:
            nonlocal told
            bar.update(task, completed=done, description=text)
            now = time.monotonic()
            if live and bar.disable and now - told >= _SECONDS_BETWEEN_LINES:
                told = now
                typer.echo(
                    text if done is None else f"step {done} of {num_steps}, {text}", err=True
                )

        yield (
            lambda done, loss: tell(f"loss {loss:.3f}", done),
            lambda done: tell(f"target: text {done} of {num_texts}"),
        )


def _report(files: TrainFiles, record: dict[str, Any], found: str) -> None:
    """Report the result of training."""
    if files.plot is not None:
        from fastspec.tools.plots import plot_loss

        plot_loss(record["losses"], files.plot)
    told = f"{record['steps']:.0f} steps, loss {record['train_loss']:.3f}"
    typer.echo(f"{files.out}: {told}; on held-out text {found}")
