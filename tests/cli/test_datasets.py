"""--dataset with --dataset-file, in the commands that take prompts."""

import json

import pytest


@pytest.fixture
def humaneval(tmp_path):
    file = tmp_path / "humaneval.jsonl"
    texts = ["def f():\n", "import os\n\ndef g(x):\n"]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
    return ["--dataset", "humaneval", "--dataset-file", file]


def test_generate(invoke, pair, humaneval):
    arguments = [*pair, *humaneval, "--max-tokens", "3", "--json"]
    both = invoke("generate", *arguments).stdout.splitlines()
    assert [json.loads(line)["prompt"][:6] for line in both] == ["def f(", "import"]
    one = invoke("generate", *arguments, "--num-prompts", "1", "--prompt", "x").stdout.splitlines()
    assert [json.loads(line)["prompt"][:6] for line in one] == ["x", "def f("]


def test_simulate(invoke, pair, humaneval, tmp_path):
    file = tmp_path / "target.txt"
    file.write_text("tensor([[65, 66]])\ntensor([[67]])\n", encoding="utf-8")
    result = invoke("simulate", file, *pair, *humaneval)
    assert result.exit_code == 0, result.stderr
    assert "2 outputs, 3 tokens" in result.stdout
    assert "2 outputs" in invoke("simulate", file, *pair, *humaneval, "--num-prompts", "1").stderr


def test_bench(invoke, pair, humaneval):
    short = ["--num-prompts", "2", "--max-tokens", "4", "--repeats", "1", "--temperatures", "0"]
    result = invoke("bench", *pair, *humaneval, *short)
    assert result.exit_code == 0, result.stderr
    assert "2 prompts" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--dataset", "pile"], "humaneval"),
        (["generate", "--dataset", "gsm8k", "--dataset-file", "missing"], "missing"),
        (["generate", "--dataset-file", "a.jsonl"], "--dataset"),
        (["generate", "--prompt", "a", "--num-prompts", "3"], "--num-prompts"),
        (["generate", "--dataset", "gsm8k", "--prompts-file", "a.txt"], "--prompts-file"),
        (["generate", "--prompts-file", __file__, "--num-prompts", "3"], "--num-prompts"),
        (["simulate", __file__, "--num-prompts", "3"], "--num-prompts"),
        (["bench", "--dataset-file", "a.jsonl"], "--dataset"),
        (["tune", "--out", "a.json", "--dataset", "pile"], "humaneval"),
    ],
)
def test_usage_errors(invoke, bundled, arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line
