"""A method of the user's own on the command line."""

import json
from collections.abc import Iterator

import pytest

from fastspec.drafters import (
    DrafterPlan,
    DraftModelDrafter,
    PromptLookupDrafter,
    register,
    unregister,
)
from fastspec.tools.tuned import load_tuned

SHORT = ["--max-tokens", "12", "--num-prompts", "1", "-k", "2"]


def drafting(context):
    model = context.load(context.drafter)

    def drafter(target, block_manager):
        runner = context.runner(model, block_manager)
        return DraftModelDrafter(runner, block_manager, context.vocab_size, probabilistic=True)

    return DrafterPlan([model], drafter)


@pytest.fixture(autouse=True)
def own_methods() -> Iterator[None]:
    register("copies", lambda context: PromptLookupDrafter(1, 2), summary="copies")
    register("drafts", drafting, needs_draft=True, summary="a draft model of mine")
    yield
    unregister("copies")
    unregister("drafts")


@pytest.mark.parametrize("method", ["copies", "drafts"])
def test_generate_and_simulate(method, invoke, bundled, tmp_path):
    run = ["generate", "--prompt", "abcabc", "--max-tokens", "12", "--temperature", "0", "--json"]
    file = tmp_path / "run.jsonl"
    plain = json.loads(invoke(*run, "--method", "none").stdout)
    ours = json.loads(invoke(*run, "--method", method, "--save-outputs", file).stdout)
    assert ours["token_ids"] == plain["token_ids"]
    result = invoke("simulate", file, "--method", method, "--json")
    assert json.loads(result.stdout)["num_reproduced"] == 1


def test_bench_and_tune(invoke, bundled, tmp_path):
    file = tmp_path / "bench.jsonl"
    result = invoke("bench", "--method", "copies", *SHORT, "--repeats", "1", "--out", file)
    assert result.exit_code == 0, result.stderr
    assert json.loads(file.read_text())["method"] == "copies"
    out = tmp_path / "tuned.json"
    short = [*SHORT[:2], *SHORT[4:], "--num-prompts", "2", "--repeats", "1"]
    result = invoke("tune", "--out", out, "--methods", "copies,drafts", *short)
    assert result.exit_code == 0, result.stderr
    table = load_tuned(out).measured["table"]
    assert {row["method"] for row in table} == {"copies", "drafts"}


def test_refusals(invoke, bundled):
    result = invoke("generate", "--method", "copies", "--draft", "tiny-draft", "--prompt", "a")
    assert "--draft: --method copies uses no draft model" in result.stderr
    result = invoke("generate", "--method", "unknown", "--prompt", "a")
    assert result.exit_code == 2
    assert "copies, drafts, got 'unknown'" in result.stderr
