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


def test_the_first_prompts_of_a_file(invoke, pair, bundled, tmp_path):
    """All by default: the usual number of a command is for prompts that nobody has chosen."""
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"def f{number}(\n" for number in range(9)), encoding="utf-8")
    given = ["--prompts-file", file, "--max-tokens", "3"]
    told = invoke("generate", *pair, *given, "--num-prompts", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["prompt"] for line in told] == ["def f0(", "def f1("]
    short = ["--repeats", "1", "--temperatures", "0", "--no-peers"]
    for more, num in (([], 9), (["--num-prompts", "2"], 2)):
        result = invoke("bench", *pair, *given, *short, *more)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith(f"{num} prompts, ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--dataset", "pile"], "humaneval"),
        (["generate", "--dataset", "gsm8k", "--dataset-file", "missing"], "missing"),
        (["generate", "--dataset-file", "a.jsonl"], "--dataset"),
        (["generate", "--prompt", "a", "--num-prompts", "3"], "--num-prompts"),
        (["generate", "--dataset", "gsm8k", "--prompts-file", "a.txt"], "--prompts-file"),
        (["generate", "--prompts-file", __file__, "--num-prompts", "999"], "--num-prompts"),
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
