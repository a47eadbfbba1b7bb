"""Prompts from options, files, stdin and the bundled held-out set."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastspec.cli.errors import usage_errors
from fastspec.config.checks import refuse, require
from fastspec.config.files import first_json_line, parse_json_lines, read_text
from fastspec.config.options import BOOL, PATH, TEXT, Options, documented, integer, option
from fastspec.models.named import ASSETS
from fastspec.tools.prompt_sets import load_prompts


@documented
@dataclass(frozen=True)
class PromptOptions(Options):
    """Where the prompts of a command come from."""

    prompts_file: Path | None = option(
        None,
        PATH,
        'File with one prompt per line, or JSON lines with "text" or "prompt"; - is stdin.',
        metavar="FILE",
    )
    dataset: str | None = option(
        None,
        TEXT,
        "Data set of prompts: mmlu, sampled_mmlu, gsm8k, hellaswag, mt_bench, humaneval or"
        " sharegpt; mmlu_vicuna and gsm8k_vicuna are in Vicuna's format.",
    )
    dataset_file: Path | None = option(
        None,
        PATH,
        "Records of --dataset, as JSON lines or one JSON list; by default downloaded with the"
        " datasets package.",
        metavar="FILE",
    )
    num_prompts: int | None = option(
        None, integer(1), "Number of prompts to take from --dataset or the bundled set."
    )
    chat: bool = option(
        False,
        BOOL,
        "Wrap each prompt in the tokenizer's chat template; the bundled prompts are then questions,"
        " coding tasks, and texts to summarise or edit.",
    )

    def bundled(self) -> list[str]:
        """The prompts that are named, else `num_prompts` of the bundled ones."""
        if self.prompts_file is not None and self.dataset is None:
            return replace(self, num_prompts=None).named()
        if (self.dataset, self.dataset_file) != (None, None):
            return self.named()
        return bundled_prompts(self.num_prompts or 0, self.chat)

    def named(self) -> list[str]:
        """The prompts of the data set or the file; ValueError if options cannot be combined."""
        if self.dataset is not None:
            refuse("dataset", self.prompts_file, "not with --prompts-file")
            return load_prompts(self.dataset, self.dataset_file, self.num_prompts)
        refuse("dataset_file", self.dataset_file, "needs --dataset, which defines its format")
        refuse("num_prompts", self.num_prompts, "needs --dataset")
        return [] if self.prompts_file is None else read_prompts(self.prompts_file)


def typed_prompts(texts: list[str], options: PromptOptions) -> list[str]:
    """The prompts of the command line, then those that are named; without either, those of stdin.

    Raises:
        ValueError: there are none, or a file is not in the format of its suffix.
    """
    prompts = [*texts, *options.named()]
    if not prompts and not sys.stdin.isatty():
        prompts = _lines(_stdin())
    if not prompts:
        raise ValueError("no prompt: give --prompt, --prompts-file or lines on stdin")
    return prompts


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: its lines, or "text" or "prompt" of JSON lines; blank ones are skipped."""
    content = _stdin() if str(file) == "-" else read_text("prompts_file", file)
    prompts: list[Any] = _lines(content)
    if file.suffix in (".json", ".jsonl") or _prompt_of(first_json_line(content)):
        prompts = []
        for where, record in parse_json_lines(content, f"prompts_file: {file}"):
            prompts.append(_prompt_of(record))
            if prompts[-1] is None:
                raise ValueError(f'{where}: expected an object with a "text" or "prompt" string')
    if not prompts:
        raise ValueError(f"prompts_file: {file} contains no prompt")
    return prompts


def bundled_prompts(count: int, chat: bool = False) -> list[str]:
    """That many of the bundled prompts, held-out code or chat questions, spread over the set."""
    available = read_prompts(ASSETS / ("chat-prompts.jsonl" if chat else "prompts.jsonl"))
    fits = 1 <= count <= len(available)
    require("num_prompts", count, fits, f"1 to {len(available)}")
    return [available[index * len(available) // count] for index in range(count)]


def tokenize_prompts(tokenizer: Any, texts: list[str], chat: bool) -> list[list[int]]:
    """The ids of prompts; a tokenizer that cannot encode them is a usage error."""
    from fastspec.models.loading import prompt_ids

    with usage_errors():
        return [prompt_ids(tokenizer, text, chat) for text in texts]


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: not UTF-8: {error}") from error


def _lines(content: str) -> list[str]:
    return [line for line in content.split("\n") if line.strip()]


def _prompt_of(record: Any) -> str | None:
    prompt = record.get("text", record.get("prompt")) if isinstance(record, dict) else None
    return prompt if isinstance(prompt, str) else None
