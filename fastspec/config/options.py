"""Options, each declared once.

A field of a config is declared with `option(...)`: its default, its values, a line of help and its
other names. Checks, help texts, command-line flags and docs/options.md are derived from that.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from textwrap import wrap
from typing import Any, ParamSpec, TypeVar

from fastspec.config.checks import is_int, is_number, require

Config = TypeVar("Config")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_OF_VLLM = {"model": "target", "speculative_config": "spec"}  # arguments of its engine, and ours
LARGEST_INT32 = 2**31 - 1
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?(?:([KMGT])(i?)B)?")


@dataclass(frozen=True)
class Kind:
    """The values that an option accepts.

    Attributes:
        expected: describes them in errors and docs.
        fits: whether a value is one of them.
        plain: converts a value to its stored form; it may also refuse one.
        flag_type: type of the command-line flag; "json" for lists, "list" for comma-separated
            values, None for no flag.
    """

    expected: str
    fits: Callable[[Any], bool]
    plain: Callable[[Any], Any] = lambda value: value
    flag_type: Any = str


def integer(least: int, most: int | None = LARGEST_INT32) -> Kind:
    """Ints in a range, including numpy's, stored as plain ints."""
    expected = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
    return Kind(
        expected,
        lambda value: is_int(value) and least <= value and (most is None or value <= most),
        int,
        int,
    )


def number(expected: str, fits: Callable[[float], bool]) -> Kind:
    """Finite numbers, stored as floats; -0.0 becomes 0."""
    return Kind(
        expected,
        lambda value: is_number(value) and fits(float(value)),
        lambda v: float(v) + 0,
        float,
    )


def choice(*names: str) -> Kind:
    """One of a few names."""
    return Kind(
        f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names
    )


def anything(expected: str, plain: Callable[[Any], Any]) -> Kind:
    """Any value that `plain` does not refuse."""
    return Kind(expected, lambda value: True, plain, "json")


def listed(expected: str, each: Kind) -> Kind:
    """At least one of a kind, stored as a tuple."""
    return Kind(
        expected,
        lambda value: (
            isinstance(value, (list, tuple)) and 0 < len(value) == sum(map(each.fits, value))
        ),
        lambda value: tuple(map(each.plain, value)),
        "list",
    )


def _bytes_of(value: Any) -> int:
    """The bytes of a size; 0 if it is none."""
    if is_int(value):
        return int(value)
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return 0
    number, prefix, is_binary = found.groups()
    base = 1024 if is_binary else 1000
    return int(float(number) * base ** ("KMGT".index(prefix) + 1) if prefix else float(number))


BOOL = Kind("a bool", lambda value: isinstance(value, bool), flag_type=bool)
TEXT = Kind("a string", lambda value: isinstance(value, str))
SIZE = Kind(
    "a number of bytes >= 1, or one with a unit, such as 4GiB or 500MB",
    lambda value: _bytes_of(value) >= 1,
    _bytes_of,
)
PATH = Kind("a path", lambda value: isinstance(value, (str, Path)), flag_type=Path)
FACTOR = number("a finite number >= 1", lambda value: value >= 1)
POSITIVE = number("a finite number > 0", lambda value: value > 0)
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class Option:
    """A declared option.

    Attributes:
        default: None = not given, unless `takes_none` gives None a meaning of its own.
        usual: the value that None stands for, if there is one; or such values by method name, with
            "" for all other methods.
        help: one line, the help text of its flag.
        details: further text, for the docs only.
        aliases: other names, each with its origin.
        flags: its command-line flags.
        metavar: the name of its value on the command line.
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
        """The value as it is stored; ValueError for one that the option does not accept."""
        if value is None and (self.default is None or self.takes_none):
            return None
        require(self.name, value, self.kind.fits(value), self.kind.expected)
        return self.kind.plain(value)


def option(default: Any, kind: Kind, help: str, details: str = "", **more: Any) -> Any:
    """Declare a field of a config; see `Option` for the rest.

    "{usual}" in its texts is replaced by the usual value.
    """
    usual = _told(more.get("usual"))
    texts = {"help": help.replace("{usual}", usual), "details": details.replace("{usual}", usual)}
    return field(default=default, metadata={"kind": kind, **texts, **more})


def _told(usual: Any) -> str:
    """A usual value, or those of methods, as text."""
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
    """A config: each option is checked on its own at construction and stored as a plain value.

    Raises:
        ValueError: a value that its option does not accept; the message names the option.
    """

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            if (value := getattr(self, name)) is not declared.default:
                object.__setattr__(self, name, declared.checked(value))

    def is_default(self, name: str) -> bool:
        """Whether an option has its declared default."""
        value, default = getattr(self, name), options_of(type(self))[name].default
        return value is default or value == default


def documented(config: type[Config]) -> type[Config]:
    """Add the options to the docstring of a config, and hints to errors of unknown ones."""
    lines = [str(config.__doc__).rstrip(), "", "Args:"]
    for declared in options_of(config).values():
        text = f"{declared.name}: {declared.help} {declared.details}"
        lines += wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
    config.__doc__ = "\n".join([*lines, "Raises:", "    ValueError: a value out of range."])
    init: Any = with_hints(config.__init__)
    config.__init__ = init
    return config


def meant_field(config: type, name: Any) -> str | None:
    """Return the field of a config that was perhaps meant by a name that none has."""
    for declared in options_of(config).values():
        if any(alias.split(" (")[0] == name for alias in declared.aliases):
            return declared.name
    known = [*signature(config).parameters]
    longer = [field for field in known if field.startswith(f"{name}")]
    return next(iter(longer or get_close_matches(f"{name}", known, 1)), None)


def _hint(config: type, name: Any) -> str:
    for other in Options.__subclasses__():
        if name in options_of(other):
            return f"it is an option of {other.__name__}"
    if meant := meant_field(config, name):
        return f"did you mean {meant}?"
    return f"known are {', '.join(signature(config).parameters)}"


def with_hints(init: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate an `__init__` so that its errors of unknown keyword arguments end with a hint."""
    known = signature(init).parameters

    @wraps(init)
    def checked(*args: _Arguments.args, **given: _Arguments.kwargs) -> _Result:
        for name in given:
            if name not in known:
                kind = type(args[0])
                hint = _hint(kind, name) if issubclass(kind, Options) else _place(known, name)
                raise TypeError(f"{kind.__name__}: unknown argument {name!r}; {hint}")
        return init(*args, **given)

    return checked


def _place(known: Mapping[str, Parameter], name: str) -> str:
    """Say which of these arguments has an unknown one in it, or means what it means in vLLM."""
    if name in _OF_VLLM:
        return f"it is {_OF_VLLM[name]} here"
    defaults = {argument: known[argument].default for argument in sorted(known)}
    configs = [
        (each, type(value)) for each, value in defaults.items() if isinstance(value, Options)
    ]
    found = [(argument, name) for argument, kind in configs if name in signature(kind).parameters]
    found += [(argument, meant_field(kind, name)) for argument, kind in configs]
    for argument, meant in found:
        if meant is not None:
            return f"pass {argument}={{{meant!r}: ...}}"
    return f"see the options of {' and '.join(argument for argument, _ in configs)}"


def config_of(name: str, value: Any, kind: type[Config]) -> Config:
    """The value as a config of that kind; a mapping of its fields is converted.

    Raises:
        ValueError: another type, an unknown field, or a value that is wrong.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected {kind.__name__} or a mapping, got {value!r}")
    known = signature(kind).parameters
    for field_name in value:
        if field_name not in known:
            hint = _hint(kind, field_name)
            raise ValueError(f"{name}: unknown field {field_name!r}; {hint}")
    return kind(**value)
