"""`fastspec tune`: measure drafters on this machine, and write down the best one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar, table_of
from fastspec.cli.errors import (
    check_can_write,
    drafting_method,
    quiet_libraries,
    usage_errors,
)
from fastspec.cli.options import Flags, with_flags
from fastspec.cli.prompts import bundled_prompts, named_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import refuse
from fastspec.config.methods import method_named
from fastspec.models.named import own_draft
from fastspec.tools.tuned import TunedConfig, save_tuned, spec_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fastspec.drafters.context import DrafterSource
    from fastspec.tools.tune import Measurement, Plan

_MOST_DRAFT_TOKENS = 8
_WITH_DRAFT = ("draft_model", "cascade")


@with_flags
def tune(
    config: Annotated[EngineConfig, Flags("dtype", "device")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.json", help="Where the choice goes, for --config."),
    ],
    target: options.Target = "tiny",
    draft: options.Draft = None,
    prompts_file: options.OwnPrompts = None,
    num_prompts: options.NumMeasuredPrompts = 4,
    dataset: options.Dataset = None,
    dataset_file: options.DatasetFile = None,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = 128,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens", "-k", help="Draft tokens tried at most; by default 8."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated list; by default prompt_lookup, mag and suffix, and with a draft"
            " model draft_model (of several the first) and cascade (with several k_matrices);"
            " with an EAGLE draft, eagle3 (chains); with --exit-layers, early_exit."
        ),
    ] = None,
    exit_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Comma-separated numbers of the target's first layers that early_exit tries.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the measured runs; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of the chosen drafter.")] = 3,
    threads: options.Threads = None,
) -> None:
    """Choose the drafter and its number of tokens by measuring all of them on your prompts.

    One prompt at a time; predicted by the throughput model, then the choice is measured.
    """
    check_can_write("--out", out)
    draft = draft or own_draft(target, "draft_model") or own_draft(target, "eagle3")
    with usage_errors():
        exits = _exit_layers(exit_layers)
        names = _methods(methods, draft, exits)
        if all(name == "cascade" for name in names):
            refuse("num_speculative_tokens", num_speculative_tokens, "not for cascades alone")
        most = _MOST_DRAFT_TOKENS if num_speculative_tokens is None else num_speculative_tokens
        drafts = draft.split(",") if draft is not None else []
        SpecConfig(num_speculative_tokens=most)
        SamplingParams(temperature=temperature, max_tokens=max_tokens)
    named = named_prompts(dataset, dataset_file, prompts_file, num_prompts)
    texts = named or bundled_prompts(num_prompts, chat)
    quiet_libraries()
    import torch

    from fastspec.models.loading import load_model, load_tokenizer, prompt_ids
    from fastspec.tools.bench import describe_environment
    from fastspec.tools.timed_methods import load_named_draft
    from fastspec.tools.tune import Planner

    with usage_errors():
        specs = [spec for name in names for spec in _specs(name, most, target, len(drafts), exits)]
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = load_tokenizer("target", target)
    target_model = load_model("target", target, config)
    draft_models = [
        load_named_draft(name, config, tokenizer, target_model)
        for name in (drafts if any(map(_needs_draft, specs)) else ())
    ]
    with usage_errors():
        prompts = [prompt_ids(tokenizer, text, chat) for text in texts]
    planner = Planner(target_model, tokenizer, max_tokens, temperature, config)
    with progress_bar("runs") as bar:
        task = bar.add_task("measuring", total=len(prompts) * (len(specs) + repeats))

        def advance() -> None:
            bar.advance(task)

        measurements = [
            planner.measure(spec, _drafter(spec, draft_models), prompts, advance) for spec in specs
        ]
        plan = planner.choose(measurements)
        measured = planner.confirm(
            plan, _drafter(plan.spec, draft_models), prompts, repeats, advance
        )
    _show(Console(highlight=False), measurements, plan, measured, max_tokens)
    chosen = plan.spec.method, plan.spec.exit_layer
    costs = next((m for m in measurements if (m.spec.method, m.spec.exit_layer) == chosen), None)
    save_tuned(
        TunedConfig(
            target,
            _named_draft(plan.spec, drafts),
            _kept_fields(plan.spec, target, draft_models),
            _step_costs(costs, plan.spec),
            {
                **describe_environment(),
                "temperature": temperature,
                "max_tokens": max_tokens,
                "num_prompts": len(prompts),
                "predicted_speed_up": plan.predicted,
                "measured_speed_up": measured,
                "table": [row for m in measurements for row in _rows(m, max_tokens)],
            },
        ),
        out,
    )
    typer.echo(f"{out}: use it with fastspec generate --config {out}")


def _exit_layers(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"exit_layers: expected numbers like 2,4, got {text!r}") from error
    for layer in layers:
        SpecConfig("early_exit", exit_layer=layer)
    return layers


def _methods(given: str | None, draft: str | None, exit_layers: list[int]) -> list[str]:
    if given is None:
        others = ["prompt_lookup", "mag", "suffix"]
        return [*_methods_with(draft), *others, *(["early_exit"] if exit_layers else [])]
    names = [drafting_method(name.strip(), "methods") for name in given.split(",")]
    for name in names:
        if name in ("glide", "tree"):
            raise ValueError(f"methods: {name!r} cannot be tuned yet")
        if name == "early_exit" and not exit_layers:
            raise ValueError("methods: early_exit needs --exit-layers")
        if method_named(name).needs_draft and draft is None:
            raise ValueError(f"methods: {name} needs a --draft")
    if exit_layers and "early_exit" not in names:
        refuse("exit_layers", exit_layers, "only for early_exit")
    return names


def _methods_with(draft: str | None) -> tuple[str, ...]:
    """Those that a draft model can be tried with."""
    from fastspec.drafters.eagle3 import is_eagle3

    if draft is None:
        return ()
    return ("eagle3",) if "," not in draft and is_eagle3(draft) else _WITH_DRAFT


def _specs(
    method: str,
    num_speculative_tokens: int,
    target: str,
    num_models: int,
    exit_layers: list[int],
) -> list[SpecConfig]:
    """What is tried of a method: several of a cascade, whose k_matrix says how much it writes, and
    of early exit."""
    from fastspec.models.loading import bigram_beside
    from fastspec.tools.tune import k_matrices_to_try

    if method == "cascade":
        table = bigram_beside(target)
        k_matrices = k_matrices_to_try(num_models)
        return [SpecConfig(method, k_matrix=rows, bigram_path=table) for rows in k_matrices]
    if method == "early_exit":
        return [SpecConfig(method, num_speculative_tokens, exit_layer=n) for n in exit_layers]
    bigram = bigram_beside(target) if method == "mag" else None
    return [SpecConfig(method, num_speculative_tokens, bigram_path=bigram)]


def _kept_fields(spec: SpecConfig, target: str, draft_models: "list[PreTrainedModel]") -> dict:
    """What the file has to say: the target's own bigram table is found without it."""
    from fastspec.models.loading import bigram_beside
    from fastspec.models.shared_vocabulary import is_intersection

    if spec.method == "draft_model" and is_intersection(draft_models[0]):
        spec = replace(spec, heterogeneous_vocab="intersection")  # as it was measured
    fields = spec_fields(spec)
    if fields.get("bigram_path") == str(bigram_beside(target)):
        del fields["bigram_path"]
    return fields


def _drafter(spec: SpecConfig, draft_models: "list[PreTrainedModel]") -> "DrafterSource | None":
    if spec.method == "cascade":
        return draft_models
    return draft_models[0] if _needs_draft(spec) else None


def _named_draft(spec: SpecConfig, drafts: list[str]) -> str | None:
    """--draft as far as the choice uses it."""
    if not _needs_draft(spec):
        return None
    return ",".join(drafts) if spec.method == "cascade" else drafts[0]


def _needs_draft(spec: SpecConfig) -> bool:
    return method_named(spec.method).needs_draft


def _step_costs(measurement: "Measurement | None", spec: SpecConfig) -> list[float] | None:
    if measurement is None or spec.method == "cascade":
        return None
    lengths = range(spec.num_draft_tokens() + 1)
    return [measurement.step_seconds(length) for length in lengths]


def _rows(measurement: "Measurement", max_tokens: int) -> list[dict]:
    return [
        {
            "method": measurement.spec.method,
            "k": length,
            "k_matrix": measurement.spec.k_matrix,
            "exit_layer": measurement.spec.exit_layer,
            "draft_ms": 1000 * measurement.draft_seconds[length],
            "verify_ms": 1000 * measurement.verify_seconds[length],
            "tokens_per_pass": measurement.tokens_per_pass[length],
            "tokens_per_s": measurement.tokens_per_second(length),
            "speed_up": measurement.speed_up(length, max_tokens),
        }
        for length in measurement.lengths
    ]


def _show(
    console: Console,
    measurements: "list[Measurement]",
    plan: "Plan",
    measured: float,
    max_tokens: int,
) -> None:
    names = ("K", "draft ms", "verify ms", "tokens a pass", "tokens/s", "over plain")
    table = table_of(*names, label="drafter", width=22, overflow="fold")  # a k_matrix fits
    for measurement in measurements:
        for row in _rows(measurement, max_tokens):
            cells = [number(row[key]) for key in ("draft_ms", "verify_ms", "tokens_per_pass")]
            speed = number(row["tokens_per_s"], 1)
            cells += [speed, f"{row['speed_up']:.2f}x"]
            table.add_row(_label(measurement.spec), str(row["k"]), *cells)
    console.print(table)
    chosen = _label(plan.spec)
    if chosen != "none":
        chosen += f", K={plan.spec.num_draft_tokens()}"
    console.print(f"Chosen: {chosen}; predicted {plan.predicted:.2f}x, measured {measured:.2f}x")


def _label(spec: SpecConfig) -> str:
    rows = "" if spec.k_matrix is None else f" {json.dumps(spec.k_matrix, separators=(',', ':'))}"
    layer = "" if spec.exit_layer is None else f" {spec.exit_layer}"
    return spec.method + rows + layer
