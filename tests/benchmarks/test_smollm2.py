"""`python -m benchmarks.smollm2`: which runs it makes, and that they are ones that bench takes."""

import subprocess

import pytest

from benchmarks import smollm2
from fastspec.config.methods import method_named


@pytest.fixture
def made(monkeypatch):
    """The commands of a call with such arguments."""

    def call(*arguments):
        commands = []
        monkeypatch.setattr("sys.argv", ["smollm2", *arguments])
        monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[3:]))
        smollm2.main()
        return commands

    return call


def test_drafts_of_ones_own(made, capsys):
    assert len(made()) == len(smollm2.RUNS)
    assert "they need --draft DIR" in capsys.readouterr().err
    (command,) = made("--draft", "my draft", "[[1,8]")
    assert "left out" not in capsys.readouterr().err
    assert command[command.index("--draft") + 1] == "my draft"


def test_bench_takes_them(made):
    for command in made("--draft", "a"):
        assert command[0] == "bench"
        method = method_named(command[command.index("--method") + 1])
        has_draft = "--draft" in command
        assert has_draft == (method.needs_draft and method.name not in ("eagle3", "glide"))
