"""`--method cascade` in generate, demo and bench; `--method ngram`."""

import json

import pytest

from fastspec.engine.stats import SpecStats
from fastspec.tools.bench import swi

CASCADE = ["--method", "cascade", "--k-matrix", "[[2,3],[0,2]]"]
GREEDY = ["--prompt", "abc", "--max-tokens", "9", "--temperature", "0"]
BENCH = ["bench", "--num-prompts", "1", "--max-tokens", "6", "--repeats", "1", "-k", "2"]


def test_generate(invoke, pair):
    plain = invoke("generate", *pair, *GREEDY)
    for options in (CASCADE, [*CASCADE, "--lenience", "3"]):
        result = invoke("generate", *pair, *options, *GREEDY)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == plain.stdout


def test_several_drafts(invoke, model_folders):
    drafts = f"{model_folders['draft']},{model_folders['target']}"
    result = invoke(
        *("generate", "--target", model_folders["target"], "--draft", drafts, "--prompt", "abc"),
        *("--method", "cascade", "--k-matrix", "[[2,3,4],[0,2,2],[0,0,3]]", "--max-tokens", "9"),
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    stats = json.loads(result.stdout)["stats"]
    assert set(stats["num_draft_passes"]) == {"draft_model_1", "draft_model_2"}


def test_demo(invoke, bundled):
    result = invoke("demo", "--num-prompts", "1", "--max-tokens", "8", *CASCADE)
    assert result.exit_code == 0, result.stderr
    assert "the cascade proposes up to 6 tokens" in result.stdout
    assert "identical" in result.stdout


def test_bench_runs_the_parts_too(invoke, bundled, tmp_path):
    out = tmp_path / "results.jsonl"
    result = invoke(*BENCH, *CASCADE, "--temperatures", "0", "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["k_matrix"] == [[2, 3], [0, 2]]
    assert record["parts"] == {"draft_model": 2, "mag": 10}
    assert record["verified"]
    (measured,) = record["results"]
    assert {"draft_model", "mag"} <= set(measured["tokens_per_s"])
    assert "cascade / the better of its parts" in measured["ratios"]
    assert 0 < measured["swi"] < measured["mean_acceptance_length"]
    assert "SWI" in result.stdout


@pytest.mark.check
@pytest.mark.parametrize(
    "options",
    [
        (),  # the bundled draft model, and no level for the bigrams of the bundled target
        ("--draft", "tiny-draft,tiny-glide", "--k-matrix", "[[4,0,0],[0,2,0],[0,0,1]]"),
        ("--draft", "tiny-glide,tiny-glide", "--k-matrix", "[[4,0,0],[0,2,0],[0,0,1]]"),
    ],
)
def test_bench_of_a_copy_that_reviews_drafts(options, invoke, tmp_path):
    out = tmp_path / "results.jsonl"
    copied = "--method", "cascade", "--draft-bits", "8", "--no-peers", "--temperatures", "0"
    result = invoke(*BENCH, *copied, *options, "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["draft_bits"] == 8
    assert record["verified"]
    (measured,) = record["results"]
    assert 0 < measured["swi"] < measured["mean_acceptance_length"]


def test_several_draft_models_are_measured_and_counted(invoke, pair, tmp_path):
    """The passes of each cost what the published table says of it."""
    folders = {"flan-t5-large": pair[1], "flan-t5-base": pair[3], "flan-t5-small": pair[3]}
    for name, folder in folders.items():
        (tmp_path / name).symlink_to(folder)
    out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
    prompts.write_text("a b\n", encoding="utf-8")
    drafts = f"{tmp_path / 'flan-t5-base'},{tmp_path / 'flan-t5-small'}"
    cascade = ["--method", "cascade", "--k-matrix", "[[2,1],[0,3]]"]
    given = ["--target", tmp_path / "flan-t5-large", "--draft", drafts, *cascade]
    rest = ["--prompts-file", prompts, "--temperatures", "0", "--out", out]
    counted = ["--counter-version", "model_parameters"]
    result = invoke(*BENCH, *given, *rest, *counted, "--no-peers", "-k", "2")
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert [draft["name"] for draft in record["draft"]] == ["flan-t5-base", "flan-t5-small"]
    assert record["pass_costs"] == [770, 220, 60]
    assert record["parts"] == {"draft_model_1": 2, "draft_model_2": 2, "mag": 10}
    (measured,) = record["results"]
    assert {"draft_model_1", "draft_model_2", "mag"} <= set(measured["tokens_per_s"])
    passes = {"draft_model_1": 3, "draft_model_2": 10}
    stats = SpecStats(num_steps=5, num_output_tokens=20, num_draft_passes=passes)
    assert swi(stats, 770, 220, 60) == pytest.approx(20 * 770 / (5 * 770 + 3 * 220 + 10 * 60))


def test_swi_by_published_costs(invoke, pair, tmp_path):
    """The names of the models say what a pass costs; a name that says nothing is refused first."""
    folders = {"llama": pair[1], "llama-160m": pair[3]}
    for name, folder in folders.items():
        (tmp_path / name).symlink_to(folder)
    out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
    prompts.write_text("a b\n", encoding="utf-8")
    named = ["--target", tmp_path / "llama", "--draft", tmp_path / "llama-160m"]
    rest = ["--prompts-file", prompts, "--temperatures", "0", "--counter-version"]
    result = invoke(*BENCH, *named, *rest, "model_parameters", "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["pass_costs"] == [7000, 160]
    (measured,) = record["results"]
    per_step = 7000 / (7000 + 2 * 160)  # K = 2 passes of the draft before each of the target
    assert measured["swi"] >= round(measured["mean_acceptance_length"] * per_step, 3) - 1e-3
    for options, message in (
        ([*pair, *rest, "model_parameters"], "has no cost for 'target'"),
        ([*named, *rest, "previous_work"], "has no cost for 'llama"),
        ([*named, *rest, "guess"], "--counter-version: expected one of"),
    ):
        result = invoke(*BENCH, *options)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--k-matrix", "[[2,3],["], "--k-matrix: expected rows like"),
        (["--k-matrix", "[[2,3],[1,2]]"], "--k-matrix: entry [1][0] is below the diagonal"),
        (["--lenience", "0.5"], "--lenience: expected a finite number >= 1"),
        (["--k-matrix", "[[2]]", "--method", "mag"], "--k-matrix: not for method 'mag'"),
        (["-k", "3"], "-k: expected 6 (from --k-matrix)"),
    ],
)
def test_options_that_are_wrong(invoke, bundled, options, named):
    result = invoke("generate", "--prompt", "a", *CASCADE, *options)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_ngram(invoke, model_folders):
    target = ["--target", model_folders["target"], *GREEDY, "--prompt", "abcabc"]
    plain = invoke("generate", *target)
    for options in ([], ["--ngram-size", "2", "--filler-top-k", "1"]):
        result = invoke("generate", *target, "--method", "ngram", *options)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == plain.stdout
    result = invoke("generate", *target, "--method", "ngram", "--draft", "tiny-draft")
    assert result.exit_code == 2
    assert "--draft: --method ngram uses no draft model" in result.stderr
