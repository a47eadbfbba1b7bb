"""Checks that the configurations share."""

import math
from collections.abc import Mapping
from inspect import signature
from numbers import Integral, Real
from typing import Any, TypeVar

Config = TypeVar("Config")


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
    """Raise ValueError with the field's name unless the condition holds."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def refuse(name: str, value: Any, why: str) -> None:
    """Raise ValueError for a field that has no meaning here, unless it was not given."""
    if value is not None:
        raise ValueError(f"{name}: {why}, got {value!r}")


def normalise_ints(config: Any, least: int, *names: str, most: int | None = None) -> None:
    """Check fields of a frozen config and keep them as plain ints; None passes where it is default.

    Raises:
        ValueError: no int, or one below `least` or above `most`.
    """
    expected = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
    for name in names:
        value = getattr(config, name)
        if value is None and getattr(type(config), name) is None:
            continue
        fits = is_int(value) and value >= least and (most is None or value <= most)
        require(name, value, fits, expected)
        object.__setattr__(config, name, int(value))  # pyright: ignore[reportArgumentType]


def normalise_factor(config: Any, name: str) -> None:
    """Check a field that is a finite number >= 1, and keep it as a float."""
    value = getattr(config, name)
    require(name, value, is_number(value) and value >= 1, "a finite number >= 1")
    object.__setattr__(config, name, float(value))


def config_of(name: str, value: Any, kind: type[Config]) -> Config:
    """The value as a config of that kind, which a mapping of its fields becomes.

    Raises:
        ValueError: another type, a field that there is not, or one that is wrong.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected {kind.__name__} or a mapping, got {value!r}")
    known = signature(kind).parameters
    for field in value:
        if field not in known:
            raise ValueError(f"{name}: there is no field {field!r}; there are {', '.join(known)}")
    return kind(**value)


def reject_unsupported(config: Any, **neutral: Any) -> None:
    """Raise ValueError for a field that is not at the one value that works so far."""
    for name, value in neutral.items():
        given = getattr(config, name)
        if (tuple(given) if isinstance(given, list) else given) != value:
            raise ValueError(f"{name}: {given!r} is not supported yet, only {value!r}")
