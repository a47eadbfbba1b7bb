"""Checks that the configurations share."""

import math
from typing import Any


def is_int(value: Any) -> bool:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_factor(value: Any) -> bool:
    """Whether the value is a finite number >= 1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 1 <= value < math.inf


def require(name: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ValueError with the field's name unless the condition holds."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def reject_unsupported(config: Any, **neutral: Any) -> None:
    """Raise ValueError for a field that is not at the one value that works so far."""
    for name, value in neutral.items():
        given = getattr(config, name)
        if (tuple(given) if isinstance(given, list) else given) != value:
            raise ValueError(f"{name}: {given!r} is not supported yet, only {value!r}")
