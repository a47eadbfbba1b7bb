"""Results of a long run, kept as they come, so that the next run continues where it stopped."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from fastspec.config.files import parse_json, read_text, write_whole, writing


class PartFile:
    """JSON lines in FILE.part, beside the FILE that the finished run writes.

    The first line identifies the run. Only a last line without its end, which the interruption may
    have cut off, is dropped; in any other file nothing is changed. The file begins with the first
    result, so a run that is refused before leaves none.

    Attributes:
        kept: the results of earlier runs, in their order.
    """

    def __init__(self, field: str, target: Path, head: dict[str, Any], fits: Callable[[Any], bool]):
        self._field = field
        self._target = target
        self._path = target.with_name(f"{target.name}.part")
        self._head = head
        self._stream: TextIO | None = None
        self.kept = self._read(field, head, fits)

    def _read(self, field: str, head: dict[str, Any], fits: Callable[[Any], bool]) -> list[Any]:
        text = read_text(field, self._path) if self._path.exists() else ""
        damaged = f"{field}: {self._path} is damaged, remove it to begin again: line"
        lines = enumerate(text.split("\n")[:-1], 1)
        found = [parse_json(line, f"{damaged} {number} is") for number, line in lines]
        if text and found[:1] != [head]:
            what = "is from a run with other prompts or options; remove it"
            raise ValueError(f"{field}: {self._path} {what}")
        for number, value in enumerate(found[1:], 2):
            if not fits(value):
                raise ValueError(f"{damaged} {number} has no result of this command")
        return found[1:]

    def add(self, *results: Any) -> None:
        """Keep results, each on a line of its own."""
        with writing(self._field, self._path):
            if self._stream is None:
                write_whole(_lines(self._head, *self.kept), self._path)
                self._stream = self._path.open("a", encoding="utf-8")
            self._stream.write(_lines(*results))
            self._stream.flush()

    def finish(self, text: str) -> None:
        """Write the whole file, and remove this one."""
        with writing(self._field, self._target):
            write_whole(text, self._target)
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the file to the next run, if it is not finished."""
        if self._stream is not None:
            self._stream.close()


def _lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@contextmanager
def part_file(
    field: str, target: Path, kind: str, run: Any, fits: Callable[[Any], bool]
) -> Iterator[PartFile]:
    """The results that interrupted runs have kept, locked for the duration of the block.

    Args:
        field: the option that names the target file, which begins errors.
        kind: what the first line says of the command.
        run: all that the results depend on, as JSON.
        fits: whether a value is a result of the command.
    Raises:
        ValueError: another run is writing the file, or what is kept is of another run, or damaged.
    """
    lock = Path(f"{target}.lock")
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"{field}: another run is writing {target}") from error
    digest = hashlib.sha256(json.dumps(run).encode()).hexdigest()
    with held:
        try:
            part = PartFile(field, target, {kind: 1, "digest": digest}, fits)
            try:
                yield part
            finally:
                part.close()
        finally:
            lock.unlink(missing_ok=True)
