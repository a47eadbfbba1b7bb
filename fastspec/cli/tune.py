"""`fastspec tune`: measure drafters on this machine, and save the best one."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastspec.cli.display import number, progress_bar, table_of
from fastspec.cli.errors import begin
from fastspec.cli.options import FIXED_RUN, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions, tokenize_prompts, usual_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import refuse
from fastspec.config.files import writing
from fastspec.config.methods import OWN_DRAFTS, Method, drafting_method, method_named, methods
from fastspec.config.options import TEXT, Options, documented, integer, listed, option, options_of
from fastspec.config.token_trees import MAX_TREE_NODES
from fastspec.models.named import own_draft
from fastspec.tools.settings import Models
from fastspec.tools.tuned import TunedConfig, save_tuned, spec_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fastspec.tools.tune import Measurement, Plan

_MOST_DRAFT_TOKENS = 8
_PROMPTS = 4  # of a data set or the bundled set
# Of SpecConfig, what tells the rows of a method apart, and what the table calls it.
_SHOWN = {"exit_layer": "", "draft_bits": "bits", "tree_nodes": "nodes", "suffix_tokens": "copies"}
# Options that list the values to try, and the field of SpecConfig that takes one of them.
_LISTED = {"exit_layers": "exit_layer", "draft_bits": "draft_bits"}


@documented
@dataclass(frozen=True)
class TuneOptions(Options):
    """The drafters to try."""

    methods: tuple[str, ...] | None = option(
        None,
        listed("comma-separated names", TEXT),
        "Comma-separated methods to try; by default prompt_lookup, mag and suffix; with a draft"
        " model also draft_model (the first of several) and cascade (with several k_matrices); with"
        " a GLIDE, EAGLE or DFlash draft or a Gemma 4 assistant, the method of that kind; with"
        " --exit-layers, early_exit; with --draft-bits, quantized; with --tree-nodes, tree. mtp is"
        " tried only if named.",
    )
    exit_layers: tuple[int, ...] | None = option(
        None,
        listed("numbers like 2,4", integer(1)),
        "Comma-separated numbers of the target's first layers for early_exit to try.",
        metavar="N,...",
    )
    draft_bits: tuple[int, ...] | None = option(
        None,
        listed("numbers like 8,4", options_of(SpecConfig)["draft_bits"].kind),
        "Comma-separated numbers of bits of a weight to try, with quantized and draft models:"
        " 8, 4 or both.",
        metavar="N,...",
    )
    tree_nodes: tuple[int, ...] | None = option(
        None,
        listed("numbers like 4,8", integer(1, MAX_TREE_NODES)),
        "Comma-separated numbers of nodes: also try token trees where a method has them.",
        "With depths of 1, 2, 4 and so on draft tokens.",
        metavar="N,...",
    )
    suffix_tokens: int | None = option(
        None,
        options_of(SpecConfig)["suffix_tokens"].kind,
        "Also try draft models combined with copies of up to this many tokens.",
        "With chains of 1, 2, 4 and so on draft tokens, and with --tree-nodes.",
    )
    num_speculative_tokens: int | None = option(
        None,
        options_of(SpecConfig)["num_speculative_tokens"].kind,
        f"Maximum number of draft tokens to try; by default {_MOST_DRAFT_TOKENS}.",
        flags=("--num-speculative-tokens", "-k"),
    )
    repeats: int = option(3, integer(1), "Timed rounds of the chosen drafter.")

    def __post_init__(self):
        super().__post_init__()
        named = [drafting_method(name, "methods") for name in self.methods or ()]
        for method in named:
            if (missing := self._missing(method)) is not None:
                flag = missing.replace("_", "-")
                raise ValueError(f"methods: {method.name} needs --{flag}")
        if named and all(method.sets_length for method in named):
            count = self.num_speculative_tokens
            refuse("num_speculative_tokens", count, "not for only cascades")

    def own_draft(self, target: str) -> str | None:
        """The draft that comes with a target, for the first named method that needs one."""
        named = [name for name in self.methods or () if method_named(name).needs_draft]
        kinds = named[:1] if self.methods else ("draft_model", "eagle3")
        return next(filter(None, (own_draft(target, kind) for kind in kinds)), None)

    def tried(self, draft: str | None) -> list[Method]:
        """The methods that are named, or that fit the drafts, which are comma-separated."""
        tried = [method_named(name) for name in self.methods or ()]
        for method in tried:
            if method.needs_draft and draft is None:
                raise ValueError(f"methods: {method.name} needs a --draft")
            if method.needs_draft and not method.drafts_trees and draft is not None:
                _check_kind(method, draft)
        if self.methods is None:
            tried = [method for method in methods().values() if self._is_tried(method, draft)]
        names = ", ".join(method.name for method in tried)
        listed = {name for method in tried for name in _listed_for(method)}
        fields = {name for method in tried for name in method.fields}
        used = listed | (fields & {"tree_nodes", "suffix_tokens"})
        for name in (*_LISTED, "tree_nodes", "suffix_tokens"):
            if name not in used:
                refuse(name, getattr(self, name), f"none of the methods uses it: {names}")
        return tried

    def _missing(self, method: Method) -> str | None:
        """The option without which there is nothing to try of a method, if it is not given."""
        needed = [*_listed_for(method)] if method.changes_target else []
        needed += ["tree_nodes"] if method.drafts_trees else []
        return next((name for name in needed if not getattr(self, name)), None)

    def _is_tried(self, method: Method, draft: str | None) -> bool:
        if not method.is_tried or self._missing(method) is not None:
            return False
        if not method.needs_draft or draft is None:
            return not method.needs_draft
        from fastspec.drafters.auto import kind_of

        return _runs(method, "model" if "," in draft else kind_of(draft))

    def specs(self, method: Method, target: str, num_models: int) -> list[SpecConfig]:
        """The specs to try for a method: several for a cascade, whose k_matrix sets its lengths,
        for early exit, for quantized copies, for trees and for copies first."""
        from fastspec.models.loading import bigram_beside
        from fastspec.tools.tune import k_matrices_to_try

        fields: dict[str, Any] = {}
        if "bigram_path" in method.fields:
            fields["bigram_path"] = bigram_beside(target)
        if method.sets_length:
            tried = k_matrices_to_try(num_models)
            return [SpecConfig(method.name, k_matrix=rows, **fields) for rows in tried]
        most = self.num_speculative_tokens or _MOST_DRAFT_TOKENS
        lengths = [2**power for power in range(most.bit_length())]
        values = [
            {field: value}
            for name, field in _listed_for(method).items()
            for value in getattr(self, name) or ()
        ]
        copies = [None, self.suffix_tokens] if "suffix_tokens" in method.fields else [None]
        trees = (self.tree_nodes or ()) if "tree_nodes" in method.fields else ()
        shapes = [
            (length, nodes, copied)
            for copied in dict.fromkeys(copies)
            for nodes in (*(() if method.drafts_trees else (None,)), *trees)
            for length in ([most] if (nodes, copied) == (None, None) else lengths)
            if nodes is None or length <= nodes
        ]
        return [
            SpecConfig(
                method.name,
                length,
                tree_nodes=nodes,
                suffix_tokens=copied,
                **value,
                **fields,
            )
            for value in (values if method.changes_target else [{}, *values])
            for length, nodes, copied in shapes
        ]


@command
def tune(
    models: Annotated[Models, Flags()],
    config: Annotated[EngineConfig, Flags("dtype", "device")],
    prompts: Annotated[PromptOptions, Flags(shown=usual_prompts(_PROMPTS))],
    params: Annotated[SamplingParams, Flags("max_tokens", "temperature", **FIXED_RUN)],
    options: Annotated[TuneOptions, Flags()],
    out: Annotated[Path, output_file("File for the choice, to pass to --config.", "FILE.json")],
) -> None:
    """Choose a drafter and its number of tokens by measuring candidates on your prompts.

    One prompt at a time: the throughput model predicts each speed-up, then the choice is measured.
    A choice that turns out to be slower than plain decoding is not kept.
    """
    prompts.check_template(models)
    target, max_tokens = models.target, params.max_tokens or 0
    draft = models.draft or options.own_draft(target)
    drafts = draft.split(",") if draft is not None else []
    methods, texts = options.tried(draft), prompts.or_bundled(_PROMPTS)
    begin()
    from fastspec.models.loading import load_model, load_tokenizer
    from fastspec.tools.bench import describe_environment
    from fastspec.tools.timed_methods import drafter_context, load_named_draft
    from fastspec.tools.tune import Planner

    specs = [spec for method in methods for spec in options.specs(method, target, len(drafts))]
    models.use_threads()
    tokenizer = load_tokenizer("target", target)
    target_model = load_model("target", target, config)
    needs_drafts = any(method.needs_draft for method in methods)
    context = drafter_context(target_model, tokenizer, SpecConfig(), config)
    draft_models = [load_named_draft(name, context) for name in (drafts if needs_drafts else ())]
    models.use_template(tokenizer)
    ids = tokenize_prompts(tokenizer, texts, prompts.chat)
    with progress_bar("runs") as bar:
        task = bar.add_task("measuring", total=len(ids) * (len(specs) + options.repeats))

        def advance() -> None:
            bar.advance(task)

        planner = Planner(
            target_model, tokenizer, ids, max_tokens, params.temperature, config, advance
        )
        measurements = [planner.measure(spec, _used(spec, draft_models)) for spec in specs]
        plan = planner.choose(measurements)
        used = _used(plan.spec, draft_models)
        measured = planner.confirm(plan, used, options.repeats)
    _show(Console(highlight=False), measurements, plan, measured, max_tokens)
    spec = plan.spec if measured >= 1 else SpecConfig("none")
    named = _used(spec, drafts)
    chosen = TunedConfig(
        target,
        ",".join(named) if isinstance(named, list) else named,
        _kept_fields(spec, target, draft_models),
        _step_costs(measurements, spec),
        {
            **describe_environment(),
            "dtype": str(config.dtype),
            "temperature": params.temperature,
            "max_tokens": max_tokens,
            "num_prompts": len(ids),
            "method": plan.spec.method,
            "predicted_speed_up": plan.predicted,
            "measured_speed_up": measured,
            "table": [row for m in measurements for row in _rows(m, max_tokens)],
        },
    )
    with writing("out", out):
        save_tuned(chosen, out)
    typer.echo(f"{out}: use it with fastspec generate --config {out}")


def _listed_for(method: Method) -> dict[str, str]:
    """The part of _LISTED that a method is tried with; cascades are tried with k_matrices."""
    if method.sets_length:
        return {}
    return {name: field for name, field in _LISTED.items() if field in method.fields}


def _check_kind(method: Method, draft: str) -> None:
    """Refuse drafts that another method has to run, before any is loaded."""
    from fastspec.drafters.auto import kind_of

    names = draft.split(",")
    for name in names if method.takes_several else names[:1]:
        kind = kind_of(name)
        if not _runs(method, kind):
            what = OWN_DRAFTS.get(kind, "a plain draft model")
            raise ValueError(f"methods: {method.name} cannot run --draft {name}, which is {what}")


def _runs(method: Method, kind: str) -> bool:
    """Whether a method that drafts chains runs drafts of a kind."""
    return method.name == kind if kind in OWN_DRAFTS else method.name not in OWN_DRAFTS


def _used(spec: SpecConfig, drafts: list[Any]) -> Any:
    """The draft models, or their names, that a method runs."""
    method = method_named(spec.method)
    if not method.needs_draft:
        return None
    return drafts if method.takes_several else drafts[0]


def _kept_fields(spec: SpecConfig, target: str, draft_models: "list[PreTrainedModel]") -> dict:
    """The fields to save: the target's own bigram table is found without one."""
    from fastspec.models.loading import bigram_beside
    from fastspec.models.shared_vocabulary import is_intersection

    method = method_named(spec.method)
    is_told = "heterogeneous_vocab" in method.fields and not method.takes_several
    if is_told and is_intersection(draft_models[0]):
        spec = replace(spec, heterogeneous_vocab="intersection")  # as it was measured
    fields = spec_fields(spec)
    if fields.get("bigram_path") == str(bigram_beside(target)):
        del fields["bigram_path"]
    return fields


def _step_costs(measurements: "list[Measurement]", spec: SpecConfig) -> list[float] | None:
    """The step costs of the choice, if a schedule can use them."""
    from fastspec.tools.tune import has_own_shape

    if has_own_shape(spec):
        return None
    count = spec.num_draft_tokens() + 1
    for measurement in measurements:
        changed = replace(spec, num_speculative_tokens=measurement.spec.num_speculative_tokens)
        if measurement.spec == changed and measurement.lengths[:count] == [*range(count)]:
            return [measurement.step_seconds(n) for n in range(count)]
    return None


def _rows(measurement: "Measurement", max_tokens: int) -> list[dict]:
    return [
        {
            "method": measurement.spec.method,
            "k": length,
            "k_matrix": measurement.spec.k_matrix,
            **{name: getattr(measurement.spec, name) for name in _SHOWN},
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
    names = ("K", "draft ms", "verify ms", "tokens per pass", "tokens/s", "over plain")
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
        chosen += f", K={plan.spec.num_model_tokens()}"
    console.print(f"Chosen: {chosen}; predicted {plan.predicted:.2f}x, measured {measured:.2f}x")
    if measured < 1 and chosen != "none":
        console.print("That is slower than plain decoding, which is what the file chooses instead.")


def _label(spec: SpecConfig) -> str:
    rows = "" if spec.k_matrix is None else f" {json.dumps(spec.k_matrix, separators=(',', ':'))}"
    given = {title: getattr(spec, name) for name, title in _SHOWN.items()}
    words = [f"{title} {value}".strip() for title, value in given.items() if value is not None]
    return " ".join([spec.method + rows, *words])
