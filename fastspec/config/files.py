"""Text files: read with errors that name the option, written whole or not at all."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile
from typing import Any

from fastspec.config.checks import require


def require_file(field: str, path: Path) -> None:
    """Raise ValueError with the option's name unless the file exists; a pipe counts as a file."""
    with _naming(field, path, "read"):
        if not path.exists():
            raise ValueError(f"{field}: no such file: {str(path)!r}")
        _refuse_folder(field, path)


def check_can_write(field: str, path: Path) -> None:
    """Refuse a file in a folder that does not exist, or a folder, before anything slow starts."""
    with writing(field, path):
        if not path.parent.is_dir():
            raise ValueError(f"{field}: no such folder: {str(path.parent)!r}")
        _refuse_folder(field, path)
        with path.open("a") if path.exists() else TemporaryFile(dir=path.parent):
            return


def _refuse_folder(field: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{field}: expected a file, got the folder {str(path)!r}")


@contextmanager
def _naming(field: str, path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{field}: cannot {verb} {str(path)!r}: {error.strerror}") from error


def writing(field: str, path: Path) -> AbstractContextManager[None]:
    """Name the option and the file in errors of a block that writes it."""
    return _naming(field, path, "write")


def refuse_inputs(field: str, path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output file that is one of the inputs, under whatever name or link."""
    for file in inputs:
        is_input = path.is_file() and file.exists() and path.samefile(file)
        require(field, str(path), not is_input, "another file than an input of the command")


def require_regular(field: str, path: Path) -> None:
    """Refuse a device or a pipe for a file beside which unfinished results are kept."""
    fits = path.is_file() or not path.exists()
    require(field, str(path), fits, "a regular file, not a device or a pipe")


def read_text(field: str, path: Path) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        ValueError: no such file, or not UTF-8; `field` names the option.
    """
    require_file(field, path)
    try:
        with _naming(field, path, "read"):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {path} is not UTF-8: {error}") from error


def read_json(field: str, path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: no such file, or not JSON; `field` names the option.
    """
    return parse_json(read_text(field, path), f"{field}: {path} is")


def parse_json(text: str, where: str) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: not JSON, an object with a name twice, an integer with thousands of digits, or
            lists that are nested too deeply; `where` begins the message.
    """
    try:
        return json.loads(text, object_pairs_hook=unambiguous)
    except _TwiceNamed as error:
        raise ValueError(f"{where} ambiguous: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} cut off or not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} nested too deeply") from error
    except ValueError as error:
        most = sys.get_int_max_str_digits()
        raise ValueError(f"{where} not readable: an integer has over {most} digits") from error


class _TwiceNamed(ValueError):
    """An object that has a name twice."""


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for one that has a name twice, of which Python takes the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceNamed(f"{name!r:.60} is given twice in an object")
        found[name] = value
    return found


def json_line(value: Any) -> str:
    """JSON in UTF-8; halves of surrogate pairs, which it cannot encode, stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def parse_json_lines(text: str, where: str) -> Iterator[tuple[str, Any]]:
    """The content of each non-blank line, and its place: `where` and the line's number.

    Raises:
        ValueError: a line that is not JSON, see `parse_json`.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{where}, line {number}"
            try:
                value = parse_json(line, f"{place}:")
            except ValueError:
                if _is_json(text):
                    told = "expected a JSON value on each line, got one over several lines"
                    raise ValueError(f"{place}: {told}") from None
                raise
            yield place, value


def _is_json(text: str) -> bool:
    try:
        json.loads(text, object_pairs_hook=unambiguous)
    except (ValueError, RecursionError):
        return False
    return True


def first_json_line(text: str) -> Any:
    """The content of the first non-blank line; None if it is not JSON."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    try:
        return json.loads(first)
    except (ValueError, RecursionError):
        return None


def write_whole(text: str, path: Path) -> None:
    """Write a file atomically: readers find the old one or the whole new one.

    Devices and pipes are written to, and links are followed; none is replaced by a file.
    """
    if path.exists() and not path.is_file():  # before it is resolved: a pipe's links lead nowhere
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    staged = path.with_name(f"{path.name}.{token_hex(4)}.new")  # no file that is there already
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
