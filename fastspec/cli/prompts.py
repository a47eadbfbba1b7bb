"""Prompts from options, files, stdin and the bundled held-out set."""

import sys
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from fastspec.cli.display import is_terminal
from fastspec.cli.errors import require_stdin, usage_errors
from fastspec.config.checks import refuse, require
from fastspec.config.files import first_json_line, parse_json_lines, read_text
from fastspec.config.options import BOOL, PATH, TEXT, Options, documented, integer, option
from fastspec.models.named import ASSETS
from fastspec.tools.prompt_sets import load_prompts
from fastspec.tools.settings import Models


@documented
@dataclass(frozen=True)
class PromptOptions(Options):
    """Where the prompts of a command come from."""

    prompts_file: Path | None = option(
        None,
        PATH,
        'File with one prompt per line, or JSON lines with "prompt" or "text"; - is stdin.',
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
    num_prompts: int | None = option(None, integer(1), "Number of prompts to take.")
    chat: bool = option(
        False,
        BOOL,
        "Wrap each prompt in the tokenizer's chat template; bundled prompts, if the command has"
        " any, are then questions, coding tasks, and texts to summarise or edit.",
    )

    def check_template(self, models: Models) -> None:
        """Refuse a chat template that no prompt would be wrapped in."""
        if not self.chat:
            refuse("chat_template", models.chat_template, "needs --chat")

    def or_bundled(self, usual: int) -> list[str]:
        """The prompts that are named, else bundled ones.

        Without num_prompts, all of a file, but only `usual` of a data set or of the bundled ones.
        """
        if self.prompts_file is not None and self.dataset is None:
            return self.named()
        count = usual if self.num_prompts is None else self.num_prompts
        if (self.dataset, self.dataset_file) != (None, None):
            return replace(self, num_prompts=count).named()
        return bundled_prompts(count, self.chat)

    def named(self) -> list[str]:
        """The prompts of the data set or the file; ValueError if options cannot be combined."""
        if self.dataset is not None:
            if self.prompts_file is not None:
                refuse("dataset", self.dataset, "not with --prompts-file")
            return load_prompts(self.dataset, self.dataset_file, self.num_prompts)
        refuse("dataset_file", self.dataset_file, "needs --dataset, which defines its format")
        if self.prompts_file is None:
            refuse("num_prompts", self.num_prompts, "needs --prompts-file or --dataset")
            return []
        prompts = read_prompts(self.prompts_file)
        count = len(prompts) if self.num_prompts is None else self.num_prompts
        fits = count <= len(prompts)
        require("num_prompts", count, fits, f"at most the {len(prompts)} of {self.prompts_file}")
        return prompts[:count]


def usual_prompts(count: int) -> dict[str, str]:
    """What help texts have as the default of --num-prompts, see `PromptOptions.or_bundled`."""
    return {"num_prompts": f"all of --prompts-file, else {count}"}


def typed_prompts(texts: list[str], options: PromptOptions) -> list[str]:
    """The prompts of the command line, then those that are named; without either, those of stdin.

    Raises:
        ValueError: there are none, or a file is not in the format of its suffix.
    """
    prompts = [*texts, *options.named()]
    if not prompts and not is_terminal(sys.stdin):
        prompts = _lines(_stdin())
    if not prompts:
        raise ValueError("no prompt: give --prompt, --prompts-file or lines on stdin")
    return prompts


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: its lines, or "prompt", else "text", of JSON lines.

    Blank lines are skipped. A file whose first line is a JSON object is one of JSON lines, whatever
    its name. "prompt" comes first because files of answers have it beside their "text"; for the
    same reason a record with "messages" is refused.

    Raises:
        ValueError: no such file, one without a prompt, or a record with none.
    """
    content = _stdin() if str(file) == "-" else read_text("prompts_file", file)
    prompts: list[Any] = _lines(content)
    if file.suffix in (".json", ".jsonl") or isinstance(first_json_line(content), dict):
        prompts = []
        for where, record in parse_json_lines(content, f"prompts_file: {file}"):
            prompts.append(_prompt_of(record))
            expected = 'an object with a "prompt" or "text" string, and no "messages"'
            require(where, record, prompts[-1] is not None, expected)
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
    from fastspec.models.chat import prompt_ids

    with usage_errors():
        return [prompt_ids(tokenizer, text, chat) for text in texts]


def _stdin() -> str:
    """The text on stdin, read as a file is: in UTF-8, without a byte-order mark."""
    require_stdin()
    if isinstance(sys.stdin, TextIOWrapper):  # whatever the locale says
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict", newline=None)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: not UTF-8: {error}") from error


def _lines(content: str) -> list[str]:
    return [line for line in content.split("\n") if line.strip()]


def _prompt_of(record: Any) -> str | None:
    if not isinstance(record, dict) or "messages" in record:
        return None
    prompt = record["prompt"] if "prompt" in record else record.get("text")
    return prompt if isinstance(prompt, str) else None
