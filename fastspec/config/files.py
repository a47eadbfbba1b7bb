"""Text files: read with errors that name the option, written whole or not at all."""

import json
from pathlib import Path
from typing import Any


def read_text(field: str, path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: no such file, or not UTF-8; `field` names the option.
    """
    if not path.is_file():
        raise ValueError(f"{field}: no such file: {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path} is not UTF-8: {error}") from error


def read_json(field: str, path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: no such file, or not JSON; `field` names the option.
    """
    try:
        return json.loads(read_text(field, path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{field}: {path} is cut off or not JSON: {error}") from error


def write_whole(text: str, path: Path) -> None:
    """Write a file; whoever reads it finds the old one or the whole new one."""
    staged = path.with_name(path.name + ".new")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
