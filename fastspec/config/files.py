"""Text files: read with errors that name the option, written whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any


def require_file(field: str, path: Path) -> None:
    """Raise ValueError with the option's name unless there is such a file; a pipe is one, too."""
    if not path.exists() or path.is_dir():
        raise ValueError(f"{field}: no such file: {str(path)!r}")


def check_can_write(field: str, path: Path) -> None:
    """Refuse a file in a folder that does not exist, or a folder, before anything slow starts."""
    if not path.parent.is_dir():
        raise ValueError(f"{field}: no such folder: {str(path.parent)!r}")
    if path.is_dir():
        raise ValueError(f"{field}: expected a file, {str(path)!r} is a folder")
    try:
        with path.open("a") if path.exists() else TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise ValueError(f"{field}: cannot write {str(path)!r}: {error.strerror}") from error


def read_text(field: str, path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: no such file, or not UTF-8; `field` names the option.
    """
    require_file(field, path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path} is not UTF-8: {error}") from error


def read_json(field: str, path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: no such file, or not JSON; `field` names the option.
    """
    return parse_json(read_text(field, path), f"{field}: {path} is")


def parse_json(text: str, where: str) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: not JSON, a number of thousands of digits, or lists in lists without an end;
            `where` begins the message.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cut off or not JSON: {error}") from error


def json_line(value: Any) -> str:
    """JSON in UTF-8; halves of characters, which it cannot hold, stay escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def parse_json_lines(text: str, where: str) -> Iterator[tuple[str, Any]]:
    """What each line holds that is not blank, and its place: `where` and the line's number.

    Raises:
        ValueError: a line that is not JSON, see `parse_json`.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{where}, line {number}"
            yield place, parse_json(line, f"{place}:")


def first_json_line(text: str) -> Any:
    """What the first line that is not blank holds; None where that is not JSON."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    try:
        return json.loads(first)
    except (ValueError, RecursionError):
        return None


def write_whole(text: str, path: Path) -> None:
    """Write a file; whoever reads it finds the old one or the whole new one.

    Devices, pipes and what links point to are written themselves, never replaced by a file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    staged = path.with_name(path.name + ".new")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
