"""Options that several commands share, each with its one-sentence help."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fastspec.config.files import parse_json
from fastspec.config.methods import methods
from fastspec.tools.tuned import load_tuned

Target = Annotated[
    str,
    typer.Option(
        metavar="PATH_OR_ID",
        help='Target: a folder, a hub id, or "tiny" for the bundled pair.',
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_ID",
        help="Draft model with the target's tokenizer; the bundled target brings its own. Of a"
        " cascade several, biggest first, with commas between them.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="Tokens proposed in each step; by default 5 (bench: 4), of a cascade what --k-matrix"
        " says.",
    ),
]
CopyingMethod = Annotated[
    str,
    typer.Option(
        help="How to draft: "
        + ", ".join(name for name in methods() if name not in ("auto", "none"))
        + "; see docs/drafters.md."
    ),
]
PromptLookupMin = Annotated[
    int | None, typer.Option(help="prompt_lookup: last tokens that must agree, 5 by default.")
]
PromptLookupMax = Annotated[
    int | None, typer.Option(help="prompt_lookup: last tokens that are compared at most.")
]
Bigram = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="mag, cascade: the bigram table; by default the target's own."
    ),
]
NgramSize = Annotated[
    int | None, typer.Option(help="ngram: tokens of the longest n-grams, 4 by default.")
]
FillerTopK = Annotated[
    int | None,
    typer.Option(help="ngram: how many of the target's likeliest tokens count, 3 by default."),
]
KMatrix = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="cascade: who drafts how much for whom, like [[5,10],[0,10]] for a draft model and"
        " MaG; see fastspec.drafters.CascadeDrafter.",
    ),
]
Lenience = Annotated[
    float,
    typer.Option(help="cascade: how much the drafts forgive each other, >= 1; the target nothing."),
]
TreeWidth = Annotated[
    int | None, typer.Option(help="tree: children of a node at most, 4 by default.")
]
TreeNodes = Annotated[
    int | None, typer.Option(help="tree: nodes of a tree at most, 16 by default; -k is its depth.")
]
Cape = Annotated[
    bool,
    typer.Option("--cape", help="Add siblings where a draft model is unsure of its chain."),
]
CapeBins = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="cape: up to which probability a token gets how many siblings, like"
        " [[0.3,3],[0.6,2],[0.8,1],[1,0]]; by default 7, 5, 3 and 1.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="New tokens of each prompt at most.")]
Dtype = Annotated[
    str, typer.Option(help="Weights: auto (float32 on CPU), float32, bfloat16 or float16.")
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="Keys and values: auto (as the model) or float8, which rounds them to 8 bits (GPU)."
    ),
]
Device = Annotated[str, typer.Option(help="Where the models run: auto, cpu, cuda, cuda:1, ...")]
NumPrompts = Annotated[int, typer.Option(help="How many of the bundled held-out prompts to use.")]
NumMeasuredPrompts = Annotated[
    int,
    typer.Option("--num-prompts", help="How many of the bundled prompts, or of --dataset, to use."),
]


Dataset = Annotated[
    str | None,
    typer.Option(help="Prompts of mmlu, gsm8k, hellaswag, mt_bench or humaneval."),
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl", help="Its records; without it the package datasets downloads them."
    ),
]
DatasetPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", help="How many prompts of --dataset, the first ones; else all."),
]


def drafts_of(draft: str | None, method: str) -> str | list[str] | None:
    """What --draft names: of a cascade several, biggest first, with commas between them."""
    return draft.split(",") if draft is not None and method == "cascade" else draft


_ROWS = "k_matrix: expected rows like [[5,10],[0,10]], {!r:.60} is"
_PAIRS = "cape_bins: expected pairs like [[0.5,3],[1,0]], {!r:.60} is"


def k_matrix_of(text: str | None) -> list | None:
    """The rows that an option gives as JSON."""
    return None if text is None else parse_json(text, _ROWS.format(text))


def cape_bins_of(text: str | None) -> list | None:
    """The pairs that an option gives as JSON."""
    return None if text is None else parse_json(text, _PAIRS.format(text))


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    """Let a file of `fastspec tune` give the defaults of a command's options."""
    if file is None:
        return None
    try:
        tuned = load_tuned(file)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("config: ")) from error
    values = {"target": tuned.target, "draft": tuned.draft, **tuned.spec}
    if "bigram_path" in values:
        values["bigram"] = values.pop("bigram_path")
    for name in {"k_matrix", "cape_bins"} & set(values):
        values[name] = json.dumps(values[name])
    known = {parameter.name for parameter in context.command.params}
    if unknown := set(values) - known:
        raise typer.BadParameter(f"--config: this command has no {', '.join(sorted(unknown))}")
    target = values.pop("target")
    context.default_map = {
        "target": target,
        **{name: partial(_value, context, tuned.spec, value) for name, value in values.items()},
    }
    return file


def _value(context: typer.Context, spec: dict[str, Any], value: Any) -> Any:
    """A value of the file, but of its drafter nothing where --method names another one.

    Options that are given are read before those that are not.
    """
    method = spec.get("method", "auto")
    return value if context.params.get("method", method) == method else None


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.json",
        is_eager=True,
        callback=_use_config,
        help="Models and drafter from a file of fastspec tune; options given here override it.",
    ),
]
