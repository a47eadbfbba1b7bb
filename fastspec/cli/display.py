"""What the commands show: text coloured by who wrote it, a progress bar, short numbers."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastspec.config.checks import counted

STYLES = {"draft": "green", "recovered": "bold red", "bonus": "bold cyan", "target": "default"}
MEANINGS = {
    "draft": "proposed and accepted",
    "recovered": "written by the target after a rejection",
    "bonus": "written by the target after full acceptance",
    "target": "written by the target, nothing was proposed",
}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; one that the shell has closed is None."""
    return stream is not None and stream.isatty()


def coloured(pieces: Iterable[tuple[str, str]]) -> Text:
    """Pieces of a text, each in the colour of its writer."""
    text = Text()
    for piece, source in pieces:
        text.append(piece, style=STYLES[source])
    return text


def legend(sources: Iterable[str]) -> Text:
    """One line for each writer that occurs, with its share of the tokens."""
    counts = Counter(sources)
    lines = [
        Text.assemble(
            (f"{source:<9}", STYLES[source]),
            f" {counted(count, 'token'):>12} {100 * count / counts.total():>3.0f} %  {meaning}",
        )
        for source, meaning in MEANINGS.items()
        if (count := counts[source])
    ]
    return Text("\n").join(lines)


# A model's control characters are shown, so that none reaches the terminal.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def beginning(text: str, most: int = 60) -> str:
    """The beginning of a text on one line, without control characters."""
    line = " ".join(text.split()).translate(_PICTURES)
    return line if len(line) <= most else f"{line[:most].rstrip()}..."


class SourceWriter:
    """Writes pieces of text as they come, in colour, or else after a mark that names the writer."""

    def __init__(self, console: Console):
        self._console = console
        self._has_colour = console.is_terminal and not console.no_color
        self._last: str | None = None

    def write(self, piece: str, source: str) -> None:
        piece = piece.translate(_PICTURES)
        if self._has_colour:
            self._console.out(piece, style=STYLES[source], end="", highlight=False)
            return
        mark = f"<{source}>" if source != self._last else ""
        self._console.out(mark + piece, end="", highlight=False)
        self._last = source


def progress_bar(unit: str, live: bool = True) -> Progress:
    """A bar on stderr that leaves no trace; nothing at all where stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (live and console.is_terminal),
    )


def table_of(*columns: str, label: str | None = None, **label_column: Any) -> Table:
    """An empty table of right-aligned columns, after one for labels if that has a title."""
    table = Table(show_edge=False, pad_edge=False)
    if label is not None:
        table.add_column(label, **label_column)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
