"""`fastspec bench`: our decoding against Hugging Face's on the same weights and prompts."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar
from fastspec.cli.errors import check_can_write, drafting_method, usage_errors
from fastspec.cli.prompts import bundled_prompts, named_prompts
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.methods import methods as known_methods
from fastspec.drafters.glide import load_glide
from fastspec.models.loading import bigram_beside, check_same_tokenizer, load_model, load_tokenizer
from fastspec.tools.bench import (
    ACCEPTANCE,
    BenchConfig,
    Methods,
    describe_environment,
    measure,
    num_parameters,
    require_equal,
    verify_outputs,
)
from fastspec.tools.bench.environment import ROOT

_DRAFTED_TOKENS = 4
_MAG_TOKENS = 10  # what CS-Drafting's MaG writes
RESULTS = ROOT / "benchmarks" / "results"


def bench(
    target: options.Target = "tiny",
    draft: options.Draft = None,
    config_file: options.Config = None,
    num_prompts: options.NumMeasuredPrompts = 8,
    prompts_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of your own, read as generate does."),
    ] = None,
    dataset: options.Dataset = None,
    dataset_file: options.DatasetFile = None,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    method: options.CopyingMethod = "draft_model",
    prompt_lookup_min: options.PromptLookupMin = None,
    prompt_lookup_max: options.PromptLookupMax = None,
    bigram: options.Bigram = None,
    ngram_size: options.NgramSize = None,
    filler_top_k: options.FillerTopK = None,
    k_matrix: options.KMatrix = None,
    lenience: options.Lenience = 1.0,
    tree_width: options.TreeWidth = None,
    tree_nodes: options.TreeNodes = None,
    cape: options.Cape = False,
    cape_bins: options.CapeBins = None,
    temperatures: Annotated[str, typer.Option(help="Comma-separated list; 0 is greedy.")] = "0,1",
    repeats: Annotated[
        int, typer.Option(help="Timed rounds over all prompts; the median counts.")
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="CPU threads; without it what torch chooses."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the record to this .jsonl file.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Append the record to the checkout's results.")
    ] = False,
) -> None:
    """Time plain, speculative, and Hugging Face's plain and assisted decoding, batch 1, in one run.

    All run on one loaded pair and make equally many tokens; greedy outputs are compared first. A
    cascade's parts run beside it, the draft model with K of -k and MaG with K = 10.
    """
    is_cascade = method == "cascade"
    with usage_errors():
        has_draft = known_methods()[drafting_method(method)].needs_draft
    if not has_draft and draft is not None:
        raise typer.BadParameter(f"--draft: --method {method} uses no draft model")
    if draft is None and has_draft:
        if target != "tiny":
            raise typer.BadParameter("--draft: a --target of your own needs a draft model")
        draft = "tiny-glide" if method == "glide" else "tiny-draft"
    with usage_errors():
        config = BenchConfig(max_tokens, repeats, _numbers(temperatures))
        table = bigram or (bigram_beside(target) if method in ("mag", "cascade") else None)
        num_drafted = _DRAFTED_TOKENS if num_speculative_tokens is None else num_speculative_tokens
        spec = SpecConfig(
            drafting_method(method),
            None if is_cascade else num_drafted,  # k_matrix says how many
            prompt_lookup_min=prompt_lookup_min,
            prompt_lookup_max=prompt_lookup_max,
            bigram_path=table,
            ngram_size=ngram_size,
            filler_top_k=filler_top_k,
            k_matrix=options.k_matrix_of(k_matrix),
            lenience=lenience,
            tree_width=tree_width,
            tree_nodes=tree_nodes,
            cape=cape,
            cape_bins=options.cape_bins_of(cape_bins),
        )
        parts = {
            "draft_model": SpecConfig("draft_model", num_drafted),
            "mag": SpecConfig("mag", _MAG_TOKENS, bigram_path=table),
        }
        engine_config = EngineConfig(dtype=dtype, device=device)
    files = _record_files(out, record, f"{method}_cape" if cape else method)
    named = named_prompts(dataset, dataset_file, prompts_file, num_prompts)
    texts = named or bundled_prompts(num_prompts)
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = load_tokenizer("target", target)
    target_model = load_model("target", target, engine_config)
    draft_model = None
    if draft is not None:
        check_same_tokenizer(tokenizer, load_tokenizer("draft", draft))
        load = load_glide if method == "glide" else partial(load_model, "draft")
        draft_model = load(draft, engine_config)
    methods = Methods(
        target_model, draft_model, spec, max_tokens, engine_config, parts if is_cascade else {}
    )
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    with progress_bar("runs") as bar:
        total = config.num_runs(len(prompts), len(methods.by_name()))
        task = bar.add_task("measuring", total=total)
        equal = verify_outputs(methods, prompts, lambda: bar.advance(task))
        if target_model.dtype == torch.float32:
            require_equal(equal, len(prompts))
        results = measure(methods, prompts, config, lambda: bar.advance(task))
    result = {
        "op": "end_to_end",
        **describe_environment(),
        "device": str(target_model.device),
        "dtype": str(target_model.dtype).removeprefix("torch."),
        "target": _describe(target, target_model),
        "method": method,
        "draft": _describe(draft, draft_model) if draft else None,
        "num_speculative_tokens": spec.num_draft_tokens(),
        "k_matrix": spec.cascade_matrix if is_cascade else None,
        "lenience": spec.lenience,
        "tree_width": spec.tree_width,
        "tree_nodes": spec.tree_nodes,
        "cape": spec.cape,
        "cape_bins": spec.cape_bins,
        "parts": {name: part.num_draft_tokens() for name, part in methods.parts.items()},
        "batch_size": 1,
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "verified": all(count == len(prompts) for count in equal.values()),
        "prompts_equal_to_plain": equal,
        "results": results,
        "argv": sys.argv[1:],
    }
    _show(Console(highlight=False), result)
    for file in files:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"temperatures: expected numbers like 0,1, got {text!r}") from error


def _record_files(out: Path | None, record: bool, method: str) -> list[Path]:
    """Where the record goes, checked before anything slow starts."""
    check_can_write("--out", out)
    files = [] if out is None else [out]
    if record:
        name = "end_to_end" if method == "draft_model" else method
        files.append(RESULTS / f"{name}.jsonl")
        check_can_write("--record", files[-1])
    return files


def _describe(name: str, model) -> dict:
    return {
        "name": Path(name).name,
        "architecture": type(model).__name__,
        "parameters": num_parameters(model),
        "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "vocab_size": model.config.get_text_config(decoder=True).vocab_size,
    }


def _show(console: Console, result: dict) -> None:
    console.print(
        f"{result['num_prompts']} prompts, {result['max_tokens']} new tokens each, batch 1,"
        f" {result['method']}, K={result['num_speculative_tokens']}, {result['dtype']},"
        f" {result['threads']} threads, {result['cpu']}"
    )
    verdict = (
        "all methods gave the same token ids"
        if result["verified"]
        else f"prompts equal to plain: {result['prompts_equal_to_plain']}"
    )
    console.print(f"Compared first, greedily: {verdict}.")
    for title, key, digits in (
        ("new tokens per second", "tokens_per_s", 1),
        ("ratio", "ratios", 2),
    ):
        table = Table(show_edge=False, pad_edge=False)
        table.add_column(title)
        for row in result["results"]:
            table.add_column(f"T={row['temperature']:g}", justify="right")
        for name in result["results"][0][key]:
            table.add_row(name, *(number(row[key][name], digits) for row in result["results"]))
        if key == "ratios":
            for name in ACCEPTANCE:
                cells = (number(row[name]) for row in result["results"])
                label = "SWI" if name == "swi" else name.replace("_", " ")
                table.add_row(label, *cells)
        console.print()
        console.print(table)
