"""Prompts of the data sets that papers on speculative decoding use, from a file or the hub.

The only module that needs the package `datasets`.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.config.checks import one_line, require, require_one_of
from fastspec.config.files import parse_json, parse_json_lines, read_text


@dataclass(frozen=True)
class PromptSet:
    """One data set.

    Attributes:
        path, name, split: its location on the hub; path None = only from files.
        template: turns a record of the data set into the text of a prompt, or None if it has none;
            KeyError, TypeError or IndexError for a record of another kind.
    """

    path: str | None
    name: str | None
    split: str
    template: Callable[[dict[str, Any]], str | None]


# The texts of MMLU and GSM8K are those of CS-Drafting's experiments, blank for blank.
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions. USER: {} ASSISTANT:"
)


def _mmlu_question(record: dict[str, Any]) -> str:
    """A record of cais/mmlu, or one with the fields input, A, B, C and D."""
    if "input" in record:
        question, choices = record["input"], [record[letter] for letter in "ABCD"]
    else:
        question, choices = record["question"], record["choices"]
    first, second, third, fourth = map(_text, choices)
    return f"Question: {_text(question)}\n(A) {first} (B) {second} (C) {third} (D) {fourth}\n"


def _mmlu(record: dict[str, Any]) -> str:
    return f"{_mmlu_question(record)} Answer: \n Let's think step by step. "


def _mmlu_vicuna(record: dict[str, Any]) -> str:
    question = _mmlu_question(record)
    return _VICUNA.format(f"Answer the question step by step: {question} Answer: \n")


def _gsm8k(record: dict[str, Any]) -> str:
    question = _text(record["question"])
    return f"Reason the math question below step by step. Question: {question}.\n Answer: "


def _gsm8k_vicuna(record: dict[str, Any]) -> str:
    question = _text(record["question"])
    return _VICUNA.format(f"Reason the math question step by step. Question: {question}\n Answer: ")


def _first_turn(record: dict[str, Any]) -> str:
    turns = record["turns" if "turns" in record else "prompt"]
    if not isinstance(turns, list):
        raise TypeError(f"expected a list of turns, got {turns!r:.40}")
    return _text(turns[0])


def _question(record: dict[str, Any]) -> str | None:
    """The first question of a person; some conversations contain only answers."""
    turns = (turn for turn in record["conversations"] if turn["from"] in ("human", "user"))
    return next((_text(turn["value"]) for turn in turns), None)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.40}")
    return value


PROMPT_SETS = {
    "mmlu": PromptSet("cais/mmlu", "all", "test", _mmlu),
    "mmlu_vicuna": PromptSet("cais/mmlu", "all", "test", _mmlu_vicuna),
    "sampled_mmlu": PromptSet(None, None, "test", _mmlu),
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", _gsm8k),
    "gsm8k_vicuna": PromptSet("openai/gsm8k", "main", "test", _gsm8k_vicuna),
    "hellaswag": PromptSet("Rowan/hellaswag", None, "validation", lambda r: _text(r["ctx"])),
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", _first_turn),
    "sharegpt": PromptSet("anon8231489123/ShareGPT_Vicuna_unfiltered", None, "train", _question),
    "humaneval": PromptSet("openai/openai_humaneval", None, "test", lambda r: _text(r["prompt"])),
}


def load_prompts(name: str, file: Path | None = None, limit: int | None = None) -> list[str]:
    """The first prompts of a data set.

    Args:
        name: "mmlu", "sampled_mmlu" (from a file), "gsm8k", "hellaswag", "mt_bench", "humaneval" or
            "sharegpt"; "mmlu_vicuna" and "gsm8k_vicuna" in the format of that chat model.
        file: its records, as JSON lines, a JSON list, or an object with a list under the name of
            the split; None downloads them with `datasets`.
        limit: number of prompts; None = all.
    Raises:
        ValueError: no such data set or file, a record of another kind, too few prompts, or no file
            and `datasets` or the network is missing.
    """
    require_one_of("dataset", name, PROMPT_SETS)
    if limit is not None and limit < 1:
        raise ValueError(f"num_prompts: expected an int >= 1, got {limit!r}")
    chosen = PROMPT_SETS[name]
    if file is None:
        records = _downloaded(name, chosen)
    else:
        records = _records(read_text("dataset_file", file), f"dataset_file: {file}", chosen.split)
    prompts = []
    for where, record in records:
        is_record = isinstance(record, dict)
        require(f"{where} is not a record of {name}", record, is_record, "an object")
        try:
            prompt = chosen.template(record)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"{where} is not a record of {name}: {error!r}") from error
        if prompt is not None:
            prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts or (limit is not None and len(prompts) < limit):
        field = "dataset" if file is None else f"dataset_file: {file}"
        wanted = "a prompt" if limit in (None, 1) else f"{limit} prompts"
        raise ValueError(f"{field}: expected {wanted} of {name}, got {len(prompts)}")
    return prompts


def _records(text: str, where: str, split: str) -> Iterable[tuple[str, Any]]:
    """Records, with their places, of a JSON list, of one under the split's name, or of lines."""
    if text.lstrip().startswith("["):
        whole = parse_json(text, f"{where}:")
    else:
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, dict):
            whole = whole.get(split)
    if not isinstance(whole, list):
        return parse_json_lines(text, where)
    return ((f"{where}, record {number}", record) for number, record in enumerate(whole, 1))


def _downloaded(name: str, chosen: PromptSet) -> Iterable[tuple[str, Any]]:
    if chosen.path is None:
        raise ValueError(f"dataset: {name} needs a file")
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"dataset: {name} needs a file, or the package datasets to download it"
        ) from error
    try:
        records = load_dataset(chosen.path, chosen.name, split=chosen.split)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise ValueError(f"dataset: cannot download {name}, pass a file: {reason}") from error
    return ((f"dataset: {chosen.path}, record {n}", record) for n, record in enumerate(records, 1))
