"""The page docs/options.md: `python -m fastspec.config.reference > docs/options.md`."""

import sys
from collections.abc import Iterable

from fastspec.config.engine import EngineConfig
from fastspec.config.methods import Method, methods
from fastspec.config.options import Option, options_of
from fastspec.config.sampling import SamplingParams
from fastspec.config.serve import ServeConfig
from fastspec.config.speculation import SpecConfig

_HEAD = """# Options

<!-- written by `python -m fastspec.config.reference`, not by hand -->

All options of a request, of drafting, of the engine and of the server, with their names in Python
and on the command line of `fastspec generate` and `fastspec serve`. These are the defaults in
Python and of `generate`; [other commands](cli.md#defaults-that-differ-from-python) have some of
their own. An option that the chosen method does not use is refused by name.
"""


def reference() -> str:
    """The page."""
    parts, known = [_HEAD], methods()
    for config in (SamplingParams, SpecConfig, EngineConfig, ServeConfig):
        summary = str(config.__doc__).split("\n\n", maxsplit=1)[0]
        parts.append(f"## `{config.__name__}`\n\n{summary}\n")
        parts += [_section(config, option, known) for option in options_of(config).values()]
    parts.append("## Methods\n\n| method | how it drafts | specific options |\n| --- | --- | --- |")
    for name, method in known.items():
        parts.append(f"| `{name}` | {method.summary} | {_code(method.fields)} |")
    return "\n".join(parts) + "\n"


def _section(config: type, option: Option, known: dict[str, Method]) -> str:
    takers = [name for name, method in known.items() if option.name in method.fields]
    facts = [f"- values: {option.kind.expected}", f"- default: `{option.default!r}`"]
    if option.kind.flag_type is not None:
        facts.append(f"- command line: {', '.join(f'`{flag}`' for flag in option.flags)}")
    others = [alias for alias in option.aliases if "(" in alias]
    if others:
        facts.append(f"- other names: {', '.join(others)}")
    if systems := [alias for alias in option.aliases if alias not in others]:
        facts.append(f"- same name in: {', '.join(systems)}")
    if config is SpecConfig and takers:
        facts.append(f"- methods: {_code(takers)}")
    text = f"{option.help} {option.details}".strip()
    return f"### `{option.name}`\n\n{text}\n\n" + "\n".join(facts) + "\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    sys.stdout.write(reference())
