"""`fastspec bench`: our decoding against Hugging Face's on the same weights and prompts."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import fastspec
from fastspec.cli.display import counted, number, progress_bar, table_of
from fastspec.cli.errors import begin, note
from fastspec.cli.options import Config, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions, tokenize_prompts, usual_prompts
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.files import check_can_write, writing
from fastspec.config.methods import drafting_method
from fastspec.models.named import other_drafts, own_draft
from fastspec.tools.cost_counters import pass_cost
from fastspec.tools.settings import BenchConfig, Models

# Of SpecConfig, beside the method and K.
_RECORDED = (
    *("lenience", "mag_surplus", "tree_width", "tree_nodes", "tree_suffix", "cape", "cape_bins"),
    *("confidence_threshold", "suffix_tokens", "exit_layer", "relaxed_acceptance"),
    *("draft_bits", "synthetic_acceptance_rate"),
)
_PROMPTS = 8  # of a data set or the bundled set
ROOT = Path(fastspec.__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@command
def bench(
    models: Annotated[Models, Flags()],
    spec: Annotated[SpecConfig, Flags(without=("num_speculative_tokens",), method="draft_model")],
    engine_config: Annotated[EngineConfig, Flags("dtype", "device")],
    prompts: Annotated[PromptOptions, Flags(shown=usual_prompts(_PROMPTS))],
    config: Annotated[BenchConfig, Flags()],
    config_file: Config = None,
    out: Annotated[Path | None, output_file("Append the record to this .jsonl file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="In a checkout: append the record to its results.")
    ] = False,
    profile: Annotated[
        Path | None,
        output_file(
            "Write a torch.profiler trace of one speculative run, for chrome://tracing or"
            " Perfetto.",
            "FILE.json",
        ),
    ] = None,
) -> None:
    """Time plain, speculative, and Hugging Face's plain and assisted decoding, batch 1, in one run.

    All run on the same loaded models and generate the same number of tokens; greedy outputs are
    compared first. The draft model is also timed by itself, and so are a cascade's parts: each
    draft model with K from -k, and MaG with K = 10; with several draft models, assisted generation
    uses the biggest. Relaxed and synthetic acceptance are labelled LOSSY; outputs with synthetic
    acceptance are not compared.
    """
    method = drafting_method(spec.method)
    if not method.sets_length:
        count = config.num_speculative_tokens or spec.num_model_tokens()
        spec = replace(spec, num_speculative_tokens=count)
    models.check(method.name)
    prompts.check_template(models)
    if models.draft is None and method.needs_draft:
        models = replace(models, draft=own_draft(models.target, method.name))
        if models.draft is None and not spec.copies_target:
            known = other_drafts(models.target) or f"; {models.target} comes with none"
            needs = f"method {method.name} needs a draft model{known}"
            raise ValueError(f"draft: {needs}; give one, or another --method")
    drafts = models.drafts(method.name) or []
    drafts = drafts if isinstance(drafts, list) else [drafts]
    costs = None
    if config.counter_version is not None:
        names = [Path(name).name for name in (models.target, *drafts)]
        costs = [pass_cost(name, config.counter_version) for name in names]
    files = [] if out is None else [out]
    if record:
        files.append(_results(method.name, spec))
    texts = prompts.or_bundled(_PROMPTS)
    begin()
    import torch

    from fastspec.tools import bench as timing
    from fastspec.tools.timed_methods import Methods

    models.use_threads()
    measured = Methods(models.target, drafts, spec, engine_config, config, costs)
    if measured.refused is not None:
        peer = "assisted generation" if spec.exit_layer is None else "early exit"
        note(f"Hugging Face's {peer} is left out: it fails with {measured.refused:.200}")
    models.use_template(measured.tokenizer)
    ids = tokenize_prompts(measured.tokenizer, texts, prompts.chat)
    with progress_bar("runs") as bar:
        total = config.num_runs(len(ids), len(measured.by_name()))
        task = bar.add_task("measuring", total=total)
        equal = timing.verify_outputs(measured, ids, lambda: bar.advance(task))
        if measured.target.dtype == torch.float32:
            timing.require_equal(equal, len(ids))
        results = timing.measure(measured, ids, config, lambda: bar.advance(task))
    if profile is not None:
        timing.write_profile(measured, ids[0], config.temperatures[0], profile)
    result = {
        "op": "end_to_end",
        **timing.describe_environment(),
        **measured.describe(),
        "method": method.name,
        "num_speculative_tokens": spec.num_model_tokens(),
        "k_matrix": spec.cascade_matrix if method.sets_length else None,
        **{name: getattr(spec, name) for name in _RECORDED},
        "batch_size": 1,
        "num_prompts": len(ids),
        "prompt_tokens": sum(map(len, ids)),
        "max_tokens": config.max_tokens,
        "repeats": config.repeats,
        "lossy": spec.is_lossy,
        "verified": all(count == len(ids) for count in equal.values()),
        "prompts_equal_to_plain": equal,
        "counter_version": config.counter_version,
        "results": results,
        "argv": sys.argv[1:],
    }
    _show(Console(highlight=False), result)
    for file in files:
        with writing("out", file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")


_LEGEND = """\
SWI: CS-Drafting's speed-up, from passes and parameters instead of times.
draft cost, judge cost: time of the drafts, with their reading of the prompt, and of the target's\
 pass in each step, in steps of plain decoding.
predicted speed up: what acceptance, the draft cost and the reading of prompts give, if the judge\
 cost were 1.
efficiency: the fraction of it that was reached."""


def _results(method: str, spec: SpecConfig) -> Path:
    """The results file in a checkout that --record writes to."""
    if spec.is_lossy:
        raise ValueError("record: only for exact decoding; use --out FILE for LOSSY records")
    if not Path.cwd().is_relative_to(ROOT):
        raise ValueError(f"record: only inside the checkout {ROOT}; --out FILE works anywhere")
    name = f"{method}_cape" if spec.cape else method
    file = RESULTS / f"{'end_to_end' if name == 'draft_model' else name}.jsonl"
    check_can_write("record", file)
    return file


def _show(console: Console, result: dict) -> None:
    from fastspec.tools.bench import ACCEPTANCE

    console.print(
        f"{counted(result['num_prompts'], 'prompt')}, {counted(result['max_tokens'], 'new token')}"
        f" each, batch 1, {result['method']}, K={result['num_speculative_tokens']},"
        f" {result['dtype']},"
        f" {counted(result['threads'], 'thread')}, {result['cpu']}"
    )
    equal, ours = result["prompts_equal_to_plain"], "speculative"
    if result["lossy"]:
        ours += " (LOSSY)"
    verdict = f"prompts equal to plain: {equal}"
    if result["verified"]:
        compared = "all methods" if "speculative" in equal else f"all methods but {ours}"
        verdict = f"{compared} gave the same token ids"
    console.print(f"Greedy outputs, compared first: {verdict}.")
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
    console.print(Text(f"\n{_LEGEND}", style="dim"))
