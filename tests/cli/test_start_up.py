"""Help and refusals come without torch, and `import fastspec` without transformers."""

import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest
import typer

import fastspec
from fastspec.cli import app
from fastspec.cli.options import Flags
from fastspec.config import EngineConfig, SamplingParams, SpecConfig, reference
from fastspec.config.options import options_of

from ..test_layers import ROOT

PROMPT = ["generate", "--prompt", "a"]
COMMAND_LINES = [
    ["--help"],
    *(
        [command, "--help"]
        for command in ("generate", "demo", "bench", "tune", "simulate", "serve", "chat", "batch")
    ),
    ["train", "glide", "--help"],
    [*PROMPT, "-k", "0"],
    [*PROMPT, "--method", "medusa"],
    [*PROMPT, "--method", "mag", "--tree-width", "3"],
    [*PROMPT, "--block-size", "0"],
    [*PROMPT, "--method", "mag", "--draft", "x"],
    ["demo", "--temperature", "-1"],
    ["bench", "--temperatures", "hot"],
    ["tune", "--out", "t.json", "--methods", "nan"],
    [*PROMPT, "--backend", "nope"],
    [*PROMPT, "--method", "none", "--relaxed-acceptance", "2"],
    ["simulate", "a.jsonl", "--method", "none"],
    ["simulate", "no-such.jsonl"],
    ["batch", "--input", "no-such.jsonl", "--output", "a.jsonl"],
    ["serve", "--methods", "nope"],
    ["serve", "--methods", "auto"],
    ["serve", "--chat-template", "no-such.jinja"],
    *(
        [command, "--chat-template", "no-such.jinja"]
        for command in ("chat", "generate", "demo", "bench")
    ),
    ["train", "glide", "--data", __file__, "--out", "x", "--rate", "nan"],
]
ENTRY_POINTS = """
import sys
from importlib import metadata
asked, entry_points = [], metadata.entry_points
metadata.entry_points = lambda **group: asked.append(group) or entry_points(**group)
sys.path[:0] = sys.argv[1:]
from fastspec.cli import app
from fastspec.cli.options import Flags
print(len(asked), len(app.registered_commands) + sum(
    len(group.typer_instance.registered_commands) for group in app.registered_groups
))
"""
HEAVY = ("torch", "transformers", "huggingface_hub", "numpy")
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
sys.path[:0] = json.loads(sys.argv[1])
import fastspec
fastspec.SpecConfig("mag"), fastspec.EngineConfig(), fastspec.SamplingParams()
heavy = {"import fastspec": [name for name in json.loads(sys.argv[2]) if name in sys.modules]}
from fastspec.cli import app
from fastspec.cli.options import Flags
for arguments in json.loads(sys.argv[3]):
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(shown):
        try:
            app(arguments)
        except SystemExit:
            pass
    found = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    heavy[" ".join(arguments)] = found if shown.getvalue() else "nothing was shown"
print(json.dumps(heavy))
"""


def test_help_refusals_and_the_package_import_neither_torch_nor_transformers():
    arguments = [json.dumps(value) for value in (sys.path, HEAVY, COMMAND_LINES)]
    run = [sys.executable, "-c", PROGRAM, *arguments]
    result = subprocess.run(
        run, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    imported = json.loads(result.stdout)
    assert len(imported) == len(COMMAND_LINES) + 1
    assert {line: names for line, names in imported.items() if names} == {}


def test_installed_packages_are_read_once_for_each_command():
    """Not for each flag: their metadata are files by the hundred."""
    run = [sys.executable, "-c", ENTRY_POINTS, *sys.path]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    times, commands = map(int, result.stdout.split())
    assert 0 < times <= commands


def test_flags_have_the_defaults_of_python():
    flags = {flag.name: flag for flag in typer.main.get_command(app).commands["generate"].params}
    configs = [options_of(config) for config in (SamplingParams, SpecConfig, EngineConfig)]
    spelled = [
        {n for n, o in options.items() if o.kind.flag_type is not None} for options in configs
    ]
    for options in configs:
        for name, option in options.items():
            if option.kind.flag_type is None:
                assert name not in flags or any(name in names for names in spelled)
            else:
                assert flags[name].default == (None if option.default == () else option.default)
                assert flags[name].opts == [flag.partition("/")[0] for flag in option.flags]
                assert option.help in flags[name].help


def own_defaults() -> Iterator[str]:
    """Rows of the commands whose options have other defaults than the configs they are of."""
    groups = [
        ("", app),
        *((f"{group.name} ", group.typer_instance) for group in app.registered_groups),
    ]
    for prefix, group in groups:
        for command in group.registered_commands:
            function = command.callback
            for parameter in inspect.signature(inspect.unwrap(function)).parameters.values():
                config, *flags = typing.get_args(parameter.annotation) or (None,)
                if not flags or not isinstance(flags[0], Flags):
                    continue
                offered = {option.name: option for option in flags[0].of(config)}
                for name, value in flags[0].defaults.items():
                    if name in offered and offered[name].default is not None:
                        python = f"`{config.__name__}`: {offered[name].default}"
                        flag = offered[name].flags[0]
                        yield f"| `{prefix}{function.__name__}` | `{flag}` | {value} | {python} |"


def test_other_defaults_than_python_has_are_told():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("## Defaults that differ from Python")[2]
    table = section.partition("| --- |")[2].splitlines()[1:]
    assert table == list(own_defaults())


@pytest.mark.parametrize("name", ["Engine", "csd", "drafters", "train"])
def test_names_are_imported_when_they_are_used(monkeypatch, name):
    expected = getattr(fastspec, name)
    monkeypatch.delattr(fastspec, name)
    assert getattr(fastspec, name) is expected


def test_every_public_name_is_there():
    assert set(fastspec.__all__) <= set(dir(fastspec))
    assert all(getattr(fastspec, name) is not None for name in fastspec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        fastspec.Motor  # noqa: B018


def test_the_page_of_options_is_the_declared_one():
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == reference.reference(), "run python -m fastspec.config.reference"
