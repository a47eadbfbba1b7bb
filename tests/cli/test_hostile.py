"""Absurd values, broken files, closed pipes: one line that names the option, and no traceback."""

import json
import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastspec import Engine
from fastspec.cli import app
from fastspec.config.files import write_whole

PROMPT = ["--prompt", "a", "--max-tokens", "3"]
TUNED = {
    "fastspec_config": 1,
    "target": "tiny",
    "draft": "tiny-draft",
    "spec": {"method": "draft_model", "num_speculative_tokens": 2},
}
STORED = {"prompt_token_ids": [1], "token_ids": [1]}
FILES = {
    "empty": b"",
    "half.json": b"{",
    "deep.json": b"[" * 100_000,
    "deep.jsonl": b"[" * 100_000,
    "digits.json": b"9" * 5000,
    "digits.jsonl": b'{"prompt": ' + b"9" * 5000 + b"}",
    "twice.jsonl": b'{"prompt": "a", "prompt": "b"}',
    "null": b"null",
    "null-list.json": b"[null]",
    "pretty.json": b'{\n  "test": null\n}\n',
    "outside.jsonl": b'{"prompt_ids": [1], "token_ids": [99999]}',
    "limit.jsonl": json.dumps({**STORED, "max_tokens": 0}).encode(),
    "bytes": b"\xff\xfe\0",
    "text.txt": b"hello world, " * 60,
    "run.jsonl": json.dumps(STORED).encode(),
    "null.jsonl": json.dumps({**STORED, "max_tokens": None}).encode(),
    "nan.jsonl": json.dumps({**STORED, "temperature": float("nan")}).encode(),
    "words.json": json.dumps({**TUNED, "spec": {"num_speculative_tokens": "x"}}).encode(),
    "other.json": json.dumps({**TUNED, "target": 3}).encode(),
}
GLIDE = ["train", "glide", "--data", "text.txt", "--out", "out"]
EAGLE3 = ["train", "eagle3", "--data", "text.txt", "--out", "out", "--context", "32"]
SIMULATE = ["simulate", "run.jsonl", "--method", "mag"]
CASCADE = ["--method", "cascade"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken files in the working directory."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)


def run(*arguments, **options) -> SimpleNamespace:
    """The command line in a process of its own, which takes stdin and other options."""
    command = [sys.executable, "-m", "fastspec", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL, "env": environment} | options
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)
    return SimpleNamespace(**vars(ended), exit_code=ended.returncode)


def assert_one_line(result, named, code):
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastspec: error: ")
    assert named in line
    assert len(line) < 400
    assert result.exit_code == code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "1e39"], "--temperature: "),
        (["--temperature", "1e-45"], "--temperature: "),
        (["--min-p", "nan"], "--min-p: "),
        (["--seed", str(2**63)], "--seed: "),
        (["-k", str(10**12)], "-k: expected an int from 1"),
        (["--num-speculative-tokens=-1"], "--num-speculative-tokens: "),
        (["--method", "prompt_lookup", "--prompt-lookup-max", str(10**30)], "--prompt-lookup-max"),
        (["--method", "ngram", "--ngram-size", str(10**6)], "--ngram-size: "),
        (["--method", "ngram", "--filler-top-k", str(10**6)], "--filler-top-k: "),
        (["--method", "mag", "--draft-sample-method", "greedy"], "--draft-sample-method: not for"),
        (["--tree-width", "3"], "--tree-width: not for method 'auto'"),
        ([*CASCADE, "-k", "5"], "-k: expected 15 (from --k-matrix)"),
        ([*CASCADE, "--k-matrix", "["], "--k-matrix: "),
        ([*CASCADE, "--k-matrix", "[" * 100_000], "--k-matrix: "),
        ([*CASCADE, "--k-matrix", "[[NaN]]"], "--k-matrix: "),
        ([*CASCADE, "--k-matrix", "[[1000000]]"], "--k-matrix: "),
        (["--cape-bins", "[[1,0]]"], "--cape-bins: only with cape"),
        (["--cape", "--cape-bins", "[[NaN,1],[1,0]]"], "--cape-bins: "),
        (["--cape", "--cape-bins", "5"], "--cape-bins: "),
        (["--config", "half.json"], "--config"),
        (["--config", "deep.json"], "--config"),
        (["--config", "digits.json"], "--config"),
        (["--config", "words.json"], "--config"),
        (["--config", "other.json"], "--config"),
        (["--prompts-file", "bytes"], "--prompts-file: "),
        (["--prompts-file", "deep.jsonl"], "--prompts-file: "),
        (["--dataset", "gsm8k", "--dataset-file", "deep.jsonl"], "--dataset-file: "),
        (["--dataset", "gsm8k", "--dataset-file", "null"], "line 1 is not a record of gsm8k: exp"),
        (
            ["--dataset", "gsm8k", "--dataset-file", "null-list.json"],
            "gsm8k: expected an object",
        ),
        (["--dataset", "gsm8k", "--dataset-file", "pretty.json"], "got one over several lines"),
        (["--dataset", "gsm8k", "--prompts-file", "text.txt"], "--prompts-file, got 'gsm8k'"),
        (["--dataset-file", "text.txt"], "got 'text.txt'"),
        (["--prompts-file", "twice.jsonl"], "line 1: ambiguous: 'prompt' is given twice"),
        (["--prompts-file", "digits.jsonl"], "line 1: not readable: an integer has over 4300"),
        (["--config", "deep.json"], "deep.json is nested too deeply"),
        (["--save-outputs", "/proc/x.jsonl"], "--save-outputs: "),
        (["--save-outputs", "n" * 300 + ".jsonl"], "--save-outputs: cannot write 'nnn"),
        (["--prompts-file", "n" * 300], "--prompts-file: cannot read 'nnn"),
        (["--prompts-file", "/"], "--prompts-file: expected a file, got the folder '/'"),
        (["--config", "/proc/self/mem"], "--config: cannot read '/proc/self/mem': "),
    ],
)
def test_generate(invoke, bundled, arguments, named):
    assert_one_line(invoke("generate", *PROMPT, *arguments), named, 2)


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (["generate", *PROMPT, "--device", "meta"], "--device: ", 1),
        (["generate", *PROMPT, "--method", "mag", "--bigram", "deep.json"], "--bigram: ", 1),
        (
            ["generate", *PROMPT, "--structured-outputs", '{"regex":"("}'],
            "parse error: unclosed group",
            1,
        ),
        (["generate", "--prompt", "\udcff"], "prompt 1: 'utf-8' codec", 1),
        (["generate", "--prompt", "\udcff", "--json"], "prompt 1: 'utf-8' codec", 1),
        (["generate", *PROMPT, "--chat", "--prompt-template", "{input_text}"], "--prompt-temp", 2),
        (["simulate", "deep.jsonl", "--method", "mag"], "FILE: deep.jsonl, line 1", 1),
        (["simulate", "null.jsonl", "--method", "mag"], "line 1, ", 1),
        (["simulate", "nan.jsonl", "--method", "mag"], "line 1, ", 1),
        ([*SIMULATE, "--verify-seconds", "nan", "--draft-seconds", "1"], "--verify-seconds: ", 2),
        ([*SIMULATE, "--log", "/proc/x"], "--log: ", 2),
        (["bench", "--temperatures", "0,1e39"], "--temperatures: ", 2),
        (["bench", "--threads", str(10**9)], "--threads", 2),
        (["demo", "-k", str(10**12)], "-k: ", 2),
        (["tune", "--out", "t.json", "--methods", "nan"], "--methods: ", 2),
        (["tune", "--out", "t.json", "--methods", "cascade", "-k", "3"], "-k: not for", 2),
        ([*GLIDE, "--hidden-size", str(10**30)], "--hidden-size", 2),
        ([*GLIDE, "--batch-size", str(10**30)], "--batch-size", 2),
        ([*GLIDE, "--context", str(10**30)], "--context", 2),
        ([*GLIDE, "--seed", str(10**30)], "--seed", 2),
        ([*GLIDE, "--rate", "nan"], "--rate: ", 2),
        ([*GLIDE, "--data", "deep.jsonl"], "--data: ", 1),
        ([*GLIDE, "--data", "digits.jsonl"], "line 1: not readable: an integer has over 4300", 1),
        (
            ["simulate", "limit.jsonl", "--method", "mag"],
            "FILE: limit.jsonl, line 1, max_tokens: ",
            1,
        ),
        ([*SIMULATE, "--log", "/dev/full"], "--log: cannot write '/dev/full': No space left", 1),
        (["train", "bigram", "outside.jsonl", "--out", "o"], "line 1: token_ids: expected ids", 1),
        (["train", "bigram", "empty", "--out", "o"], "error: FILE: expected at least one with", 1),
        (["train", "bigram", "text.txt", "--out", "/dev/full"], "--out: cannot write '/dev/", 1),
        (["train", "texts", "--prompts-file", "text.txt", "--out", "o.jsonl"], "--target: ", 2),
        ([*EAGLE3, "--start", "nowhere"], "--start: no such folder: 'nowhere'", 2),
        (
            ["bench", "--counter-version", "previous_work"],
            "--counter-version: previous_work has",
            2,
        ),
    ],
)
def test_other_commands(invoke, bundled, arguments, named, code):
    assert_one_line(invoke(*arguments), named, code)


def test_another_method_than_the_file_leaves_its_drafter_out(invoke, bundled, tmp_path):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(TUNED), encoding="utf-8")
    for method in ("mag", "cascade", "none"):
        result = invoke("generate", *PROMPT, "--config", file, "--method", method, "--json")
        assert result.exit_code == 0, result.stderr
    result = invoke("generate", *PROMPT, "--config", file, "--method", "draft_model", "--json")
    assert len(json.loads(result.stdout)["stats"]["acceptance_histogram"]) <= 3


def test_an_output_of_many_tokens_is_simulated(invoke, bundled, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({**STORED, "max_tokens": 10**27}), encoding="utf-8")
    result = invoke("simulate", file, "--method", "mag")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", ["run.jsonl", "./run.jsonl", "link.jsonl", "same.jsonl"])
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "bigram", "text.txt", "run.jsonl"], "--out"),
        (["train", "bigram", "text.txt", "--target", "run.jsonl"], "--out"),
        (["train", "draft", "--data", "text.txt", "--data", "run.jsonl", "--out", "o"], "--plot"),
        (["generate", *PROMPT, "--prompts-file", "run.jsonl"], "--save-outputs"),
        (["simulate", "run.jsonl", "--method", "mag"], "--log"),
        (["batch", "--input", "run.jsonl"], "--output"),
        (["tune", "--prompts-file", "run.jsonl"], "--out"),
        (["bench", "--prompts-file", "run.jsonl"], "--profile"),
    ],
)
def test_no_output_is_an_input(invoke, bundled, name, arguments, option):
    file = Path("run.jsonl")
    content = file.read_bytes()
    Path("link.jsonl").symlink_to(file)
    Path("same.jsonl").hardlink_to(file)
    result = invoke(*arguments, option, name)
    assert_one_line(result, f"{option}: expected another file than an input", 2)
    assert file.read_bytes() == content


def test_no_file_is_two_outputs(invoke, bundled):
    outputs = ["--log", "new.png", "--plot", "./new.png"]
    result = invoke("simulate", "run.jsonl", "--method", "mag", *outputs)
    assert_one_line(result, "--log: expected another file than for --plot", 2)
    devices = ["--log", "/dev/null", "--plot", "/dev/null"]
    assert "another file" not in invoke("simulate", "run.jsonl", "--method", "mag", *devices).stderr


def test_no_output_is_the_file_on_stdin(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("a\n", encoding="utf-8")
    with file.open() as stream:
        result = run("generate", "--seed", "1", "--save-outputs", file, stdin=stream)
    assert_one_line(result, "--save-outputs: expected another file", 2)
    assert file.read_text(encoding="utf-8") == "a\n"


@pytest.mark.parametrize("command", [["generate", "--max-tokens", "1"], ["chat"]])
def test_a_stdin_that_is_closed(command):
    result = run(*command, preexec_fn=partial(os.close, 0), stdin=None)
    assert_one_line(result, "stdin: is closed", 2)


def test_a_stdin_that_is_closed_is_not_missed():
    result = run("generate", *PROMPT, preexec_fn=partial(os.close, 0), stdin=None)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("command", [["generate", *PROMPT], ["chat"], ["--version"]])
def test_a_stdout_that_is_closed(command):
    result = run(*command, preexec_fn=partial(os.close, 1), stdout=None)
    assert_one_line(result, "stdout: is closed", 1)


@pytest.mark.parametrize("content", [b"a\rb", b"a\r\nb\r\n", b"\xef\xbb\xbfa\n\nb"])
def test_stdin_is_read_as_files_are(invoke, pair, tmp_path, content):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    options = ["generate", *pair, "--max-tokens", "1", "--json"]
    for result in (
        invoke(*options, "--prompts-file", file),
        invoke(*options, stdin=content),
        invoke(*options, "--prompts-file", "-", stdin=content),
    ):
        assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["a", "b"]


def test_stdin_that_is_not_utf8_in_a_posix_locale(tmp_path):
    """Python would take any bytes there."""
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "POSIX"}
    with (tmp_path / "bytes.txt").open("rb") as stream:
        result = run("generate", stdin=stream, env=environment)
    assert_one_line(result, "stdin: not UTF-8", 2)


@pytest.mark.parametrize("moment", ["from typing import Annotated", "app = typer.Typer("])
def test_ctrl_c_while_the_command_line_is_imported(moment):
    """The handler is that of Ctrl-C in a shell, and the moment a line of the module imported."""
    program = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
import fastspec
file = Path(fastspec.__file__).parent / "cli" / "__init__.py"
line = file.read_text().partition(sys.argv[1])[0].count("\\n") + 1
def trace(frame, event, argument):
    if frame.f_code.co_filename == str(file) and frame.f_lineno == line:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)
    return trace
sys.settrace(trace)
from fastspec.__main__ import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", program, moment], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_ctrl_c(invoke, pair, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    result = invoke("generate", *pair, *PROMPT)
    assert result.exit_code == 130
    assert result.stderr == "fastspec: error: interrupted\n"


def test_ctrl_c_leaves_what_there_is_of_the_texts(invoke, pair, monkeypatch):
    step, taken = Engine.step, []

    def interrupted(engine):
        taken.append(engine)
        if len(taken) > 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    prompts = ["--prompt", "a", "--prompt", "b", "--max-tokens", "99", "--temperature", "0"]
    result = invoke("generate", *pair, *prompts)
    assert result.exit_code == 130
    assert result.stderr == "fastspec: error: interrupted\n"
    first, _, second = result.stdout.partition("--- prompt 2 of 2: b\n")
    assert len(first) > len("--- prompt 1 of 2: a\n\n")
    assert second.strip()
    taken.clear()
    records = invoke("generate", *pair, *prompts, "--json").stdout.splitlines()
    assert [json.loads(record)["finish_reason"] for record in records] == ["abort", "abort"]


def test_a_pipe_that_is_closed(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ended:
        app(["--version"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_devices_and_links_are_written_not_replaced(tmp_path):
    write_whole("text", Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    write_whole("text", link)
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "text"
    (tmp_path / "file.new").write_text("another file", encoding="utf-8")
    write_whole("text", file)
    assert (tmp_path / "file.new").read_text(encoding="utf-8") == "another file"
    assert [*tmp_path.glob("file*.new")] == [tmp_path / "file.new"]
    reading, writing = os.pipe()
    try:
        write_whole("text", Path(f"/dev/fd/{writing}"))  # as a shell passes >(command)
        assert os.read(reading, 9) == b"text"
    finally:
        os.close(reading)
        os.close(writing)
