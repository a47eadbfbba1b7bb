"""Prompts of the data sets that papers on speculative decoding report, from a file or the hub.

The only module that needs the package `datasets`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.config.files import parse_json, parse_json_lines, read_text


@dataclass(frozen=True)
class PromptSet:
    """One data set.

    Attributes:
        path, name, split: where the hub has it.
        template: a record as the data set has it, to the text of a prompt, None where it has none;
            KeyError, TypeError or IndexError where the record is of another kind.
    """

    path: str
    name: str | None
    split: str
    template: Callable[[dict[str, Any]], str | None]


def _mmlu(record: dict[str, Any]) -> str:
    first, second, third, fourth = record["choices"]
    return (
        f"Question: {record['question']}\n(A) {first} (B) {second} (C) {third} (D) {fourth}\n"
        "Answer: Let's think step by step."
    )


def _gsm8k(record: dict[str, Any]) -> str:
    return f"Solve this math problem step by step.\nProblem: {_text(record['question'])}\nSolution:"


def _first_turn(record: dict[str, Any]) -> str:
    return _text(record["turns" if "turns" in record else "prompt"][0])


def _question(record: dict[str, Any]) -> str | None:
    """What a person asks first; some conversations hold no more than answers."""
    turns = (turn for turn in record["conversations"] if turn["from"] in ("human", "user"))
    return next((_text(turn["value"]) for turn in turns), None)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r:.40}")
    return value


PROMPT_SETS = {
    "mmlu": PromptSet("cais/mmlu", "all", "test", _mmlu),
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", _gsm8k),
    "hellaswag": PromptSet("Rowan/hellaswag", None, "validation", lambda r: _text(r["ctx"])),
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", _first_turn),
    "sharegpt": PromptSet("anon8231489123/ShareGPT_Vicuna_unfiltered", None, "train", _question),
    "humaneval": PromptSet("openai/openai_humaneval", None, "test", lambda r: _text(r["prompt"])),
}


def load_prompts(name: str, file: Path | None = None, limit: int | None = None) -> list[str]:
    """The first prompts of a data set.

    Args:
        name: "mmlu", "gsm8k", "hellaswag", "mt_bench", "humaneval" or "sharegpt".
        file: its records, one JSON object a line or all in one list; None downloads them with
            `datasets`.
        limit: how many; None = all.
    Raises:
        ValueError: no such data set or file, a record of another kind, fewer prompts than wanted,
            or no file where `datasets` or the network is missing.
    """
    if name not in PROMPT_SETS:
        raise ValueError(f"dataset: expected one of {[*PROMPT_SETS]}, got {name!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"num_prompts: expected an int >= 1, got {limit!r}")
    chosen = PROMPT_SETS[name]
    if file is None:
        records = _downloaded(name, chosen)
    else:
        records = _stored(read_text("dataset_file", file), f"dataset_file: {file}")
    prompts = []
    for where, record in records:
        try:
            prompt = chosen.template(record)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"{where} is not a record of {name}: {error!r}") from error
        if prompt is not None:
            prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts or (limit is not None and len(prompts) < limit):
        raise ValueError(
            f"dataset: {name} has {len(prompts)} prompts here, {limit or 1} are wanted"
        )
    return prompts


def _stored(text: str, where: str) -> Iterable[tuple[str, Any]]:
    """The records of a file, each with its place."""
    if not text.lstrip().startswith("["):
        return parse_json_lines(text, where)
    records = parse_json(text, f"{where}:")
    return ((f"{where}, record {number}", record) for number, record in enumerate(records, 1))


def _downloaded(name: str, chosen: PromptSet) -> Iterable[tuple[str, Any]]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"dataset: {name} needs a file, or the package datasets to download it"
        ) from error
    try:
        records = load_dataset(chosen.path, chosen.name, split=chosen.split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"dataset: cannot download {name}, pass a file: {reason}") from error
    return ((f"dataset: {chosen.path}, record {n}", record) for n, record in enumerate(records, 1))
