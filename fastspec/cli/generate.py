"""`fastspec generate`: continue prompts."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastspec.cli.display import number
from fastspec.cli.errors import check_can_write, check_draft, note, quiet_libraries, usage_errors
from fastspec.cli.options import (
    Config,
    Dataset,
    DatasetFile,
    DatasetPrompts,
    Draft,
    Flags,
    Target,
    with_flags,
)
from fastspec.cli.prompts import check_no_dataset, collect_prompts, named_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import write_whole
from fastspec.config.methods import drafts_of

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine


@with_flags
def generate(
    params: Annotated[SamplingParams, Flags()],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags()],
    target: Target = "tiny",
    draft: Draft = None,
    config_file: Config = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt a line, or JSON lines with "text" or "prompt"; - is stdin, which'
            " is also read when no prompt is given.",
        ),
    ] = None,
    dataset: Dataset = None,
    dataset_file: DatasetFile = None,
    num_prompts: DatasetPrompts = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Wrap each prompt in the tokenizer's chat template."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt, nothing else.")
    ] = False,
    show_sources: Annotated[
        bool, typer.Option("--show-sources", help="Colour the text by who wrote each token.")
    ] = False,
    show_tree: Annotated[
        bool,
        typer.Option("--show-tree", help="Draw the token tree of each step after the text."),
    ] = False,
    save_outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write ids that fastspec simulate reads."),
    ] = None,
) -> None:
    """Continue prompts, speculatively when there is a draft model, plainly without."""
    if as_json and show_sources:
        raise typer.BadParameter("--show-sources: the JSON of --json holds the sources already")
    for name in ("logprobs", "prompt_logprobs"):
        if not as_json and getattr(params, name) is not None:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: is a part of the JSON of --json")
    if show_tree and (as_json or not (spec.drafts_trees or spec.cape)):
        raise typer.BadParameter("--show-tree: needs --method tree or --cape, and no --json")
    if save_outputs is not None:
        _check_saving(save_outputs, params)
    check_draft(spec.method, draft)
    if dataset is None:
        check_no_dataset(dataset_file, num_prompts)
        texts = collect_prompts(prompt or [], prompts_file)
    else:
        named = named_prompts(dataset, dataset_file, prompts_file, num_prompts)
        texts = [*(prompt or []), *(named or [])]
    quiet_libraries()
    from fastspec.cli.printers import JsonPrinter, TextPrinter, run_and_print
    from fastspec.engine.engine import Engine
    from fastspec.models.loading import prompt_ids
    from fastspec.tools.stored_outputs import stored_record

    engine = Engine(target, drafts_of(draft, spec.method), spec=spec, config=config)
    if spec.method == "auto" and not engine.is_speculative:
        note("no --draft, so this is plain decoding")
    with usage_errors():
        prompts = [prompt_ids(engine.tokenizer, text, True) for text in texts] if chat else texts
    streams = len(texts) == 1 and not as_json and sys.stdout.isatty()
    shown = _token_text(engine) if show_tree else None
    printer = JsonPrinter() if as_json else TextPrinter(len(texts), show_sources, streams, shown)
    start = time.perf_counter()
    outputs = run_and_print(engine, prompts, texts, params, printer)
    if save_outputs is not None:
        limit = engine.max_model_len
        records = (stored_record(o, params, limit) for o in outputs if o.error is None)
        write_whole("".join(json.dumps(record) + "\n" for record in records), save_outputs)
    if sys.stderr.isatty():
        typer.echo(_summary(engine, time.perf_counter() - start), err=True)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _check_saving(file: Path, params: SamplingParams) -> None:
    check_can_write("--save-outputs", file)
    if file.suffix != ".jsonl":
        raise typer.BadParameter(f"--save-outputs: expected a .jsonl file, got {str(file)!r}")
    if params.temperature > 0 and params.seed is None:
        raise typer.BadParameter("--save-outputs: a sampled run needs a --seed to be simulated")


def _token_text(engine: "Engine") -> Callable[[int], str]:
    """How one token is shown: on one line, spaces and all."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise typer.BadParameter("--show-tree: the target has no tokenizer")
    return lambda token_id: repr(tokenizer.decode([token_id]))


def _summary(engine: "Engine", seconds: float) -> str:
    stats = engine.stats
    speed = f"{stats.num_output_tokens} tokens in {seconds:.2f} s"
    if stats.acceptance_rate is None:
        return f"{speed}, nothing was proposed"
    length = number(stats.mean_acceptance_length)
    return f"{speed}, acceptance rate {stats.acceptance_rate:.2f}, {length} tokens per target pass"
