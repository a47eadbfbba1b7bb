"""Checks of inputs: a value is used, or refused by the name of its field."""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

_MOST_SHOWN = 120  # characters of a value that is refused


def is_int(value: Any) -> bool:
    """Whether the value is an int, numpy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether the value is a finite real number, numpy's included, and not a bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def require(name: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ValueError with the field's name unless `holds`; long values are shortened."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {_short(value)}")


def require_int(name: str, value: Any, least: int) -> None:
    """Raise ValueError with the field's name unless the value is an int >= least."""
    require(name, value, is_int(value) and value >= least, f"an int >= {least}")


def require_one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError with the field's name unless the value is one of the known names.

    The name that is most like a misspelt one is suggested.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return
    close = get_close_matches(value, names, 1) if isinstance(value, str) else []
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"{name}: {hint}expected one of {', '.join(names)}, got {_short(value)}")


def refuse(name: str, value: Any, why: str) -> None:
    """Raise ValueError for a field that is given but not supported here."""
    if value is not None:
        raise ValueError(f"{name}: {why}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(str(value) if isinstance(value, PurePath) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def counted(count: int, noun: str) -> str:
    """A number of things."""
    plural = "" if count == 1 else "es" if noun.endswith("ss") else "s"
    return f"{count} {noun}{plural}"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def require_unicode(name: str, text: str) -> None:
    """Refuse half a surrogate pair by name; the errors of tokenizers do not name the field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: {error}") from error
