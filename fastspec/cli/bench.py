"""`fastspec bench`: our decoding against Hugging Face's on the same weights and prompts."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fastspec
from fastspec.cli import options
from fastspec.cli.display import number, progress_bar, table_of
from fastspec.cli.errors import (
    check_can_write,
    check_draft,
    drafting_method,
    note,
    quiet_libraries,
    usage_errors,
)
from fastspec.cli.options import Flags, with_flags
from fastspec.cli.prompts import bundled_prompts, named_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.k_matrix import MAG_TOKENS
from fastspec.config.methods import methods
from fastspec.models.named import own_draft
from fastspec.tools.cost_counters import pass_cost

_RECORDED = (
    "lenience",
    "mag_surplus",
    "tree_width",
    "tree_nodes",
    "tree_suffix",
    "cape",
    "cape_bins",
    "confidence_threshold",
    "suffix_tokens",
    "exit_layer",
    "relaxed_acceptance",
    "synthetic_acceptance_rate",
)
ROOT = Path(fastspec.__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@with_flags
def bench(
    spec: Annotated[SpecConfig, Flags(without=("num_speculative_tokens",), method="draft_model")],
    engine_config: Annotated[EngineConfig, Flags("dtype", "device")],
    target: options.Target = "tiny",
    draft: options.Draft = None,
    config_file: options.Config = None,
    num_prompts: options.NumMeasuredPrompts = 8,
    prompts_file: options.OwnPrompts = None,
    dataset: options.Dataset = None,
    dataset_file: options.DatasetFile = None,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Tokens proposed in each step, by default as elsewhere; of a cascade, by its draft"
            " model in the run without MaG.",
        ),
    ] = None,
    counter_version: Annotated[
        str | None,
        typer.Option(
            help="Costs of CS-Drafting's SWI by the names of the models, model_parameters or"
            " previous_work; by default the numbers of their parameters."
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated list; 0 is greedy.")] = "0,1",
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Time Hugging Face's decoding as well.")
    ] = True,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed rounds over all prompts; the median counts.")
    ] = 3,
    threads: options.Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the record to this .jsonl file.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="In a checkout: append the record to its results.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write a trace of one speculative run, by torch.profiler, for chrome://tracing or"
            " Perfetto.",
        ),
    ] = None,
) -> None:
    """Time plain, speculative, and Hugging Face's plain and assisted decoding, batch 1, in one run.

    All run on one loaded pair and make equally many tokens; greedy outputs are compared first. The
    draft model runs alone, too. A cascade's parts run beside it, each draft model with K of -k and
    MaG with K = 10; with several draft models, assisted generation gets the biggest. Relaxed and
    synthetic acceptance are labelled LOSSY, and the outputs of the latter are not compared.
    """
    with usage_errors():
        heats = _temperatures(temperatures)
        method = drafting_method(spec.method)
        drafted = SpecConfig("draft_model", num_speculative_tokens)
        is_cascade = method == "cascade"
        if not is_cascade:  # its k_matrix says how many
            count = num_speculative_tokens or spec.num_model_tokens()
            spec = replace(spec, num_speculative_tokens=count)
    check_draft(method, draft)
    if draft is None and methods()[method].needs_draft:
        draft = own_draft(target, method)
        if draft is None:
            raise typer.BadParameter("--draft: a --target of your own needs a draft model")
    named_drafts = [] if draft is None else draft.split(",") if is_cascade else [draft]
    check_can_write("--profile", profile)
    costs = None
    if counter_version is not None:
        with usage_errors():
            costs = [pass_cost(Path(n).name, counter_version) for n in (target, *named_drafts)]
    if record and spec.is_lossy:
        raise typer.BadParameter("--record: only of exact decoding; --out FILE takes LOSSY records")
    files = _record_files(out, record, f"{method}_cape" if spec.cape else method)
    named = named_prompts(dataset, dataset_file, prompts_file, num_prompts)
    texts = named or bundled_prompts(num_prompts, chat)
    quiet_libraries()
    import torch

    from fastspec.models import loading
    from fastspec.tools import bench as timing
    from fastspec.tools import timed_methods

    with usage_errors():
        config = timing.BenchConfig(max_tokens, repeats, heats)
    if method in ("mag", "cascade"):
        spec = replace(spec, bigram_path=spec.bigram_path or loading.bigram_beside(target))
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = loading.load_tokenizer("target", target)
    target_model = loading.load_model("target", target, engine_config)
    reencoded = None
    if method == "draft_model":
        given = spec, engine_config, tokenizer, target_model
        reencoded = timed_methods.reencoded_draft(named_drafts[0], *given)
    if reencoded is not None:
        drafts = [loading.load_model("draft", reencoded.path, engine_config)]
    else:
        drafts = [
            timed_methods.load_named_draft(
                name, engine_config, tokenizer, target_model, is_glide=method == "glide"
            )
            for name in named_drafts
        ]
    parts: dict[str, tuple[SpecConfig, Any]] = {}
    if is_cascade:
        for number, model in enumerate(drafts, start=1):
            parts[f"draft_model_{number}" if len(drafts) > 1 else "draft_model"] = drafted, model
        parts["mag"] = SpecConfig("mag", MAG_TOKENS, bigram_path=spec.bigram_path), None
    measured = timed_methods.Methods(
        target_model, drafts, spec, max_tokens, engine_config, parts, costs, peers, reencoded
    )
    if measured.refused is not None:
        note(f"Hugging Face's early exit is left out, it fails with {measured.refused:.200}")
    with usage_errors():
        prompts = [loading.prompt_ids(tokenizer, text, chat) for text in texts]
    with progress_bar("runs") as bar:
        total = config.num_runs(len(prompts), len(measured.by_name()))
        task = bar.add_task("measuring", total=total)
        equal = timing.verify_outputs(measured, prompts, lambda: bar.advance(task))
        if target_model.dtype == torch.float32:
            timing.require_equal(equal, len(prompts))
        results = timing.measure(measured, prompts, config, lambda: bar.advance(task))
    if profile is not None:
        timing.write_profile(measured, prompts[0], heats[0], profile)
    described = [_describe(*pair) for pair in zip(named_drafts, drafts, strict=True)]
    result = {
        "op": "end_to_end",
        **timing.describe_environment(),
        "device": str(target_model.device),
        "dtype": str(target_model.dtype).removeprefix("torch."),
        "target": _describe(target, target_model),
        "method": method,
        "draft": described[0] if len(described) == 1 else described or None,
        "heterogeneous_vocab": measured.heterogeneous_vocab,
        "num_speculative_tokens": spec.num_model_tokens(),
        "k_matrix": spec.cascade_matrix if is_cascade else None,
        **{name: getattr(spec, name) for name in _RECORDED},
        "parts": {name: part.num_draft_tokens() for name, (part, _) in parts.items()},
        "batch_size": 1,
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "lossy": spec.is_lossy,
        "verified": all(count == len(prompts) for count in equal.values()),
        "prompts_equal_to_plain": equal,
        "counter_version": counter_version,
        "pass_costs": measured.costs,
        "results": results,
        "argv": sys.argv[1:],
    }
    _show(Console(highlight=False), result)
    for file in files:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")


def _temperatures(text: str) -> tuple[float, ...]:
    """The numbers of a list, each one that requests may have."""
    try:
        temperatures = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"temperatures: expected numbers like 0,1, got {text!r}") from error
    for temperature in temperatures:
        try:
            SamplingParams(temperature=temperature)
        except ValueError as error:
            raise ValueError(f"temperatures: {error}") from error
    return temperatures


def _record_files(out: Path | None, record: bool, method: str) -> list[Path]:
    """Where the record goes, checked before anything slow starts."""
    check_can_write("--out", out)
    files = [] if out is None else [out]
    if record:
        if not Path.cwd().is_relative_to(ROOT):
            raise typer.BadParameter(
                f"--record: only inside the checkout {ROOT}; --out FILE works anywhere"
            )
        name = "end_to_end" if method == "draft_model" else method
        files.append(RESULTS / f"{name}.jsonl")
        check_can_write("--record", files[-1])
    return files


def _describe(name: str, model: Any) -> dict:
    from fastspec.tools.timed_methods import num_parameters

    return {
        "name": Path(name).name,
        "architecture": type(model).__name__,
        "parameters": num_parameters(model),
        "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "vocab_size": model.config.get_text_config(decoder=True).vocab_size,
    }


def _show(console: Console, result: dict) -> None:
    from fastspec.tools.bench import ACCEPTANCE

    console.print(
        f"{result['num_prompts']} prompts, {result['max_tokens']} new tokens each, batch 1,"
        f" {result['method']}, K={result['num_speculative_tokens']}, {result['dtype']},"
        f" {result['threads']} threads, {result['cpu']}"
    )
    equal, ours = result["prompts_equal_to_plain"], "speculative"
    if result["lossy"]:
        ours += " (LOSSY)"
    verdict = f"prompts equal to plain: {equal}"
    if result["verified"]:
        compared = "all methods" if "speculative" in equal else f"all methods but {ours}"
        verdict = f"{compared} gave the same token ids"
    console.print(f"Compared first, greedily: {verdict}.")
    for title, key, digits in (
        ("new tokens per second", "tokens_per_s", 1),
        ("ratio", "ratios", 2),
    ):
        table = table_of(*(f"T={row['temperature']:g}" for row in result["results"]), label=title)
        for name in result["results"][0][key]:
            label = name.replace("speculative", ours)
            table.add_row(label, *(number(row[key][name], digits) for row in result["results"]))
        if key == "ratios":
            for name in ACCEPTANCE:
                cells = (number(row[name]) for row in result["results"])
                label = "SWI" if name == "swi" else name.replace("_", " ")
                table.add_row(label, *cells)
        console.print()
        console.print(table)
