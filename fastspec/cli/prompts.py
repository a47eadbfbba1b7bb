"""Prompts from options, files, stdin and the bundled held-out set."""

import sys
from pathlib import Path
from typing import Any

import typer

from fastspec.cli.errors import usage_errors
from fastspec.config.files import first_json_line, parse_json_lines, read_text
from fastspec.models.named import ASSETS
from fastspec.tools.prompt_sets import load_prompts


def collect_prompts(texts: list[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of the file; without either, those of stdin.

    Raises:
        typer.BadParameter: there is none, or the file is not what its name says.
    """
    prompts = list(texts)
    if file is not None:
        prompts += read_prompts(file)
    elif not texts and not sys.stdin.isatty():
        prompts += _lines(_stdin())
    if not prompts:
        raise typer.BadParameter("no prompt: give --prompt, --prompts-file or lines on stdin")
    return prompts


def named_prompts(
    dataset: str | None, dataset_file: Path | None, file: Path | None, count: int | None
) -> list[str] | None:
    """The first `count` prompts of a data set, or those of a file; None where neither is named.

    Raises:
        typer.BadParameter: both are named, or what is named has no such prompts.
    """
    if dataset is None:
        check_no_dataset(dataset_file, None)
        return read_prompts(file) if file else None
    if file is not None:
        raise typer.BadParameter("--dataset: --prompts-file names other prompts")
    with usage_errors():
        return load_prompts(dataset, dataset_file, count)


def check_no_dataset(dataset_file: Path | None, num_prompts: int | None) -> None:
    """Refuse the options that --dataset reads, where it is not given."""
    if dataset_file is not None:
        raise typer.BadParameter("--dataset-file: needs a --dataset that says what it holds")
    if num_prompts is not None:
        raise typer.BadParameter("--num-prompts: needs a --dataset, whose prompts it counts")


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: each line, of JSON lines "text" or "prompt"; blank lines are skipped."""
    with usage_errors():
        content = _stdin() if str(file) == "-" else read_text("--prompts-file", file)
        if file.suffix in (".json", ".jsonl") or _prompt_of(first_json_line(content)):
            records = parse_json_lines(content, f"--prompts-file: {file}")
            prompts = [_json_prompt(*record) for record in records]
        else:
            prompts = _lines(content)
    if not prompts:
        raise typer.BadParameter(f"--prompts-file: {file} holds no prompt")
    return prompts


def bundled_prompts(count: int, chat: bool = False) -> list[str]:
    """That many of the bundled prompts, held-out code or questions to chat, of the whole set."""
    available = read_prompts(ASSETS / ("chat-prompts.jsonl" if chat else "prompts.jsonl"))
    if not 1 <= count <= len(available):
        raise typer.BadParameter(f"--num-prompts: expected 1 to {len(available)}, got {count}")
    return [available[index * len(available) // count] for index in range(count)]


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin: not UTF-8: {error}") from error


def _lines(content: str) -> list[str]:
    return [line for line in content.split("\n") if line.strip()]


def _json_prompt(where: str, record: Any) -> str:
    prompt = _prompt_of(record)
    if prompt is None:
        raise typer.BadParameter(f'{where}: expected an object with a "text" or "prompt" string')
    return prompt


def _prompt_of(record: Any) -> str | None:
    prompt = record.get("text", record.get("prompt")) if isinstance(record, dict) else None
    return prompt if isinstance(prompt, str) else None
