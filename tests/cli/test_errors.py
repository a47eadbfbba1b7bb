"""Bad input is one line on stderr that names what is wrong, an exit code, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastspec.models import named

PROMPT = ["--prompt", "a", "--max-tokens", "3"]


def one_line(result) -> str:
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastspec: error: ")
    assert result.stdout == ""
    return line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["--max-token", "3"], "No such option: --max-token (Possible options: "),
        (["--model", "m"], "No such option: --model (use --target)"),
        (["--speculative-config={}"], "(use --method and --num-speculative-tokens)"),
        (["--tensor-parallel-size", "2"], "(see docs/scaling.md)"),
        (["-k", "0"], "-k: expected an int from 1 to 1024 (for plain decoding use method none)"),
        (["--logit-bias", '{"1": 2, "1": 3}'], "is ambiguous: '1' is given twice"),
        (["-k", "many"], "num-speculative-tokens"),
        (["--temperature", "-1"], "--temperature: "),
        (["--temperature", "nan"], "--temperature: "),
        (["--top-p", "0"], "--top-p: "),
        (["--top-k=-3"], "--top-k: "),
        (["--min-p", "2"], "--min-p: "),
        (["--seed", "-1"], "--seed: "),
        (["--max-tokens", "0"], "--max-tokens: "),
        (["--stop", ""], "--stop: "),
        (["--method", "medusa"], "--method: expected one of auto, none, "),
        (["--method", "medusa"], "tree, got 'medusa'"),
        (["--method", "eagle4"], "--method: did you mean 'eagle3'? expected one of auto, none, "),
        (["--method", "cascade", "--num-speculative-tokens", "3"], "--num-speculative-tokens: "),
        (["--dtype", "int4"], "--dtype: "),
        (["--draft-sample-method", "best"], "--draft-sample-method: "),
        (["--max-batch-size", "0"], "--max-batch-size: "),
        (["--prompts-file", "missing.txt"], "missing.txt"),
        (["--json", "--show-sources"], "--show-sources"),
        (["--method", "none", "--schedule", "adaptive"], "--schedule"),
        (["--save-outputs", "."], "--save-outputs"),
        (["--method", "none"], "--draft"),
    ],
)
def test_usage_errors(invoke, pair, arguments, named):
    result = invoke("generate", *pair, *PROMPT, *arguments)
    assert result.exit_code == 2
    assert named in one_line(result)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no prompt"),
        ("{", "line 1: cut off or not JSON"),
        ('{"text": "a"}\n[1]', "line 2: expected an object"),
        ('{"text": 5}', "line 1"),
        ('{"text": "an answer", "prompt": [5]}', "line 1"),
        ('{"text": "an answer", "messages": []}', "line 1"),
    ],
)
@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_prompt_files_that_are_none(invoke, pair, tmp_path, name, content, named):
    if name.endswith("txt") and content[:2] != '{"':
        return  # a text
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    result = invoke("generate", *pair, "--prompts-file", file)
    assert result.exit_code == 2
    assert named in one_line(result)


def test_prompt_file_that_is_not_text(invoke, pair, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe\x00")
    result = invoke("generate", *pair, "--prompts-file", file)
    assert result.exit_code == 2
    assert "not UTF-8" in one_line(result)


def test_prompts_from_a_pipe(invoke, pair):
    read, write = os.pipe()
    os.write(write, b"one\n\ntwo\n")
    os.close(write)
    try:
        given = ["--prompts-file", f"/dev/fd/{read}", "--max-tokens", "2", "--json"]
        result = invoke("generate", *pair, *given)
    finally:
        os.close(read)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2


def test_no_prompt(invoke, pair):
    result = invoke("generate", *pair)
    assert result.exit_code == 2
    assert "no prompt" in one_line(result)


def test_missing_model(invoke, tmp_path):
    result = invoke("generate", "--target", tmp_path / "nowhere", *PROMPT)
    assert result.exit_code == 1
    assert "--target: no such folder" in one_line(result)


def test_draft_with_another_tokenizer(invoke, model_folders):
    """It drafts the tokens that both have, and the output is what it is without."""
    target, greedy = ["--target", model_folders["target"]], ["--temperature", "0"]
    stranger = [*target, "--draft", model_folders["stranger"]]
    result = invoke("generate", *stranger, *PROMPT, *greedy)
    assert result.exit_code == 0, result.stderr
    plain = invoke("generate", *target, "--method", "none", *PROMPT, *greedy)
    assert result.stdout == plain.stdout


def test_unusable_device(invoke, pair):
    result = invoke("generate", *pair, *PROMPT, "--device", "abacus")
    assert result.exit_code == 1
    assert "--device: cannot use 'abacus'" in one_line(result)


def test_chat_without_a_template(invoke, pair):
    result = invoke("generate", *pair, *PROMPT, "--chat")
    assert result.exit_code == 2
    assert "no chat template; give a --chat-template" in one_line(result)


@pytest.mark.parametrize(
    ("prompt", "named"), [("", "is empty"), ("a" * 300, "has 300 tokens; the limit is 255")]
)
def test_a_prompt_that_cannot_run_leaves_the_others(invoke, pair, prompt, named):
    prompts = ["--prompt", prompt, "--prompt", "a", "--max-tokens", "3", "--temperature", "0"]
    result = invoke("generate", *pair, *prompts, "--json")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fastspec: error: prompt 1: {named}")
    first, second = result.stdout.splitlines()
    assert '"finish_reason": "error"' in first
    assert named in first
    assert '"finish_reason": "length"' in second


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--num-prompts", "0"], "--num-prompts"),
        (["demo", "--num-prompts", "1000"], "--num-prompts"),
        (["demo", "--temperature", "-1"], "--temperature: "),
        (["demo", "--svg", "no/such/folder/demo.svg"], "--svg"),
        (["demo", "--svg", "."], "--svg"),
        (["demo", "--method", "none"], "tree, got 'none'"),
        (["simulate", "x.jsonl", "--log", "no/such/folder/log"], "--log"),
        (["tune", "--out", "."], "--out"),
        (["tune", "--out", "t.json", "--methods", "mag,tree"], "tree needs --tree-nodes"),
        (["tune", "--out", "t.json", "--tree-nodes", "0"], "--tree-nodes: "),
        (["tune", "--out", "t.json", "--methods", "mag", "--tree-nodes", "4"], "--tree-nodes: "),
        (
            ["tune", "--out", "t.json", "--methods", "mag", "--suffix-tokens", "4"],
            "--suffix-tokens",
        ),
        (["train", "glide", "--data", __file__, "--out", __file__], "--out"),
        (["train", "bigram", __file__, "--out", "."], "--out"),
        (["bench", "--out", "."], "--out"),
        (["bench", "--temperatures", "0,hot"], "temperatures"),
        (["bench", "--temperatures", "-1"], "--temperatures: "),
        (["bench", "--repeats", "0"], "--repeats"),
        (["bench", "-k0"], "-k: "),
        (["bench", "--threads", "0"], "--threads"),
        (["bench", "--target", "elsewhere"], "--draft"),
        (["bench", "--target", "elsewhere"], "needs a draft model; elsewhere comes with none"),
        (["bench", "--target", "smollm2"], "; smollm2 comes with drafts for glide, eagle3; give"),
        (["bench", "--out", "no/such/folder/results.jsonl"], "no/such/folder"),
        (["info", "extra"], "extra"),
        (["draw"], "draw"),
    ],
)
def test_usage_errors_of_other_commands(invoke, bundled, arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in one_line(result)


def test_a_run_too_short_to_tune(invoke, bundled, tmp_path):
    out = tmp_path / "tuned.json"
    short = ["--methods", "mag", "--num-prompts", "1", "--max-tokens", "1"]
    result = invoke("tune", "--out", out, *short)
    assert result.exit_code == 1
    assert "--max-tokens: 1 is too few to measure" in one_line(result)
    assert not out.exists()


def test_a_bundled_model_that_is_missing(invoke, bundled, monkeypatch, tmp_path):
    monkeypatch.setitem(named.BUNDLED, "tiny-glide", tmp_path / "nowhere")
    result = invoke("generate", "--method", "glide", *PROMPT)
    assert result.exit_code == 1
    assert "'tiny-glide' is missing from this copy" in one_line(result)


def test_a_group_without_a_command_shows_its_help(invoke):
    result = invoke("train")
    assert result.exit_code == 2
    assert result.stderr == ""
    assert "bigram" in result.stdout


def test_as_a_program_of_its_own(tmp_path: Path):
    program = [sys.executable, "-m", "fastspec", "generate", "--target", "./nowhere", *PROMPT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "./nowhere" in one_line(result)
