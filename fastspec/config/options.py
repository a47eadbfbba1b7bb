"""Options, each declared once.

A field of a config is declared with `option(...)`: its default, what it takes, a line of help and
its other names. Checks, help texts, command-line flags and docs/options.md come from that.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar

from fastspec.config.checks import is_int, is_number, require

Config = TypeVar("Config")
LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Kind:
    """The values that an option takes.

    Attributes:
        expected: what they are, for errors and docs.
        fits: whether a value is one of them.
        plain: the value as it is kept; it may refuse one, too.
        flag_type: what a command-line flag reads; "json" for lists, "list" for what commas
            separate, None where no flag can say it.
    """

    expected: str
    fits: Callable[[Any], bool]
    plain: Callable[[Any], Any] = lambda value: value
    flag_type: Any = str


def integer(least: int, most: int | None = LARGEST_INT32) -> Kind:
    """Ints of a range, numpy's included, kept as plain ones."""
    expected = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
    return Kind(
        expected,
        lambda value: is_int(value) and least <= value and (most is None or value <= most),
        int,
        int,
    )


def number(expected: str, fits: Callable[[float], bool]) -> Kind:
    """Finite numbers, kept as floats; -0.0 becomes 0."""
    return Kind(
        expected,
        lambda value: is_number(value) and fits(float(value)),
        lambda v: float(v) + 0,
        float,
    )


def choice(*names: str) -> Kind:
    """One of a few names."""
    return Kind(f"one of {names}", lambda value: isinstance(value, str) and value in names)


def anything(expected: str, plain: Callable[[Any], Any], flag_type: Any = "json") -> Kind:
    """What `plain` does not refuse."""
    return Kind(expected, lambda value: True, plain, flag_type)


def listed(expected: str, each: Kind) -> Kind:
    """At least one of a kind, kept as a tuple."""
    return Kind(
        expected,
        lambda value: (
            isinstance(value, (list, tuple)) and 0 < len(value) == sum(map(each.fits, value))
        ),
        lambda value: tuple(map(each.plain, value)),
        "list",
    )


BOOL = Kind("a bool", lambda value: isinstance(value, bool), flag_type=bool)
TEXT = Kind("a text", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, (str, Path)), flag_type=Path)
FACTOR = number("a finite number >= 1", lambda value: value >= 1)
POSITIVE = number("a finite number > 0", lambda value: value > 0)
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class Option:
    """A declared option.

    Attributes:
        default: None = not given, unless `takes_none` gives None a meaning beside another default.
        usual: what None stands for, where that is a value; or such values by the names of methods,
            under "" that of all others.
        help: one line, the help text of its flag.
        details: what only the docs say.
        aliases: other names, each with whose it is.
        flags: how the command line spells it.
        metavar: what the command line calls its value.
    """

    name: str
    default: Any
    kind: Kind
    help: str
    details: str = ""
    aliases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    takes_none: bool = False
    usual: Any = field(default=None, hash=False)  # it may be a dict

    def usual_for(self, method: str) -> Any:
        """What None stands for with a method."""
        if not isinstance(self.usual, dict):
            return self.usual
        return self.usual.get(method, self.usual[""])

    def checked(self, value: Any) -> Any:
        """The value as it is kept; ValueError for one that the option does not take."""
        if value is None and (self.default is None or self.takes_none):
            return None
        require(self.name, value, self.kind.fits(value), self.kind.expected)
        return self.kind.plain(value)


def option(default: Any, kind: Kind, help: str, details: str = "", **more: Any) -> Any:
    """Declare a field of a config; see `Option` for the rest.

    "{usual}" in its texts becomes the usual value.
    """
    usual = _told(more.get("usual"))
    texts = {"help": help.replace("{usual}", usual), "details": details.replace("{usual}", usual)}
    return field(default=default, metadata={"kind": kind, **texts, **more})


def _told(usual: Any) -> str:
    """A usual value, or those of methods, in a text."""
    if isinstance(usual, dict):
        others = ", ".join(f"{name}: {_told(value)}" for name, value in usual.items() if name)
        return f"{_told(usual[''])} ({others})"
    return f"{usual:.15g}" if is_number(usual) else json.dumps(usual, separators=(",", ":"))


@cache
def options_of(config: type) -> dict[str, Option]:
    """The options of a config by name, in their order."""
    return {
        each.name: Option(
            each.name,
            each.default,
            **{"flags": (f"--{each.name.replace('_', '-')}",), **each.metadata},
        )
        for each in fields(config)
        if "kind" in each.metadata
    }


class Options:
    """A config: every option is checked on its own when it is made, and kept as a plain value.

    Raises:
        ValueError: a value that its option does not take, by the name of the option.
    """

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            if (value := getattr(self, name)) is not declared.default:
                object.__setattr__(self, name, declared.checked(value))


def documented(config: type[Config]) -> type[Config]:
    """Add the options to the docstring of a config."""
    lines = [str(config.__doc__).rstrip(), "", "Args:"]
    for declared in options_of(config).values():
        text = f"{declared.name}: {declared.help} {declared.details}"
        lines += wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
    config.__doc__ = "\n".join([*lines, "Raises:", "    ValueError: a value out of range."])
    return config
