"""`fastspec tune` writes a file that generate and bench read; what it measures decides no test."""

import json
import re
from dataclasses import replace

import pytest

from fastspec import SpecConfig
from fastspec.cli.tune import TuneOptions
from fastspec.config.methods import method_named
from fastspec.engine.pacing import Pacer
from fastspec.tools.tune import Plan, Planner

from ..engine.eagle3_models import write_folder
from ..models import random_model

SHORT = ["--max-tokens", "30", "-k", "2", "--repeats", "1"]


@pytest.fixture
def prompts_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def f(\na b a b a\n", encoding="utf-8")
    return file


def test_what_proves_slower_than_plain_decoding_is_not_kept(
    invoke, pair, tmp_path, prompts_file, monkeypatch
):
    suffix = SpecConfig("suffix", 2)
    monkeypatch.setattr(Planner, "choose", lambda *_: Plan(suffix, 1.3))
    monkeypatch.setattr(Planner, "confirm", lambda *_: 0.9)
    out = tmp_path / "tuned.json"
    run = ["tune", *pair[:2], *SHORT, "--prompts-file", prompts_file, "--methods", "suffix"]
    result = invoke(*run, "--dtype", "float32", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "Chosen: suffix, K=2; predicted 1.30x, measured 0.90x" in result.stdout
    assert "slower than plain decoding" in result.stdout
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["spec"] == {"method": "none"}
    assert record["draft"] is record["step_costs"] is None
    assert record["measured"]["method"] == "suffix"
    used = ["generate", "--config", out, "--prompt", "ab", "--max-tokens", "4"]
    assert "was tuned with --dtype float32, not auto" in invoke(*used).stderr
    assert "tuned" not in invoke(*used, "--dtype", "float32").stderr


def saved(file, **fields):
    record = {"fastspec_config": 1, "target": "tiny", "draft": None, **fields}
    file.write_text(json.dumps(record), encoding="utf-8")
    return file


def test_the_choice_is_written_and_used(invoke, pair, tmp_path, prompts_file):
    out = tmp_path / "tuned.json"
    arguments = [*pair, *SHORT, "--prompts-file", prompts_file, "--out", out]
    result = invoke("tune", *arguments)
    assert result.exit_code == 0, result.stderr
    for name in ("draft_model", "cascade", "prompt_lookup", "mag", "Chosen: ", "measured"):
        assert name in result.stdout
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {row["method"] for row in record["measured"]["table"]} == {
        "draft_model",
        "cascade",
        "prompt_lookup",
        "mag",
        "suffix",
    }
    assert record["measured"]["predicted_speed_up"] >= 1.0
    matrices = [row["k_matrix"] for row in record["measured"]["table"] if row["k_matrix"]]
    assert len(matrices) == 2 * 5  # with drafts and without
    assert [[2, 10], [0, 0]] in matrices
    assert [[6, 8], [0, 8]] in matrices
    prompt = ["--prompt", "ab", "--max-tokens", "8", "--temperature", "0"]
    used = invoke("generate", "--config", out, *prompt)
    assert used.exit_code == 0, used.stderr
    plain = invoke("generate", *pair[:2], *prompt, "--method", "none")
    assert used.stdout == plain.stdout


def test_methods_can_be_named(invoke, pair, tmp_path, prompts_file):
    out = tmp_path / "tuned.json"
    named = ["--methods", "mag, prompt_lookup", "--out", out]
    result = invoke("tune", *pair[:2], *SHORT, "--prompts-file", prompts_file, *named)
    assert result.exit_code == 0, result.stderr
    assert "draft_model" not in result.stdout


def test_exit_layers(invoke, pair, tmp_path, prompts_file, monkeypatch):
    """Each is tried; the chosen one and what its own steps cost are kept."""
    seen: list = []

    def last(self, measurements):
        seen.extend(measurements)
        return Plan(replace(measurements[1].spec, num_speculative_tokens=1), 1.5)

    monkeypatch.setattr(Planner, "choose", last)
    monkeypatch.setattr(Planner, "confirm", lambda *_: 1.0)
    out = tmp_path / "tuned.json"
    run = ["tune", *pair[:2], *SHORT, "--prompts-file", prompts_file, "--out", out]
    result = invoke(*run, "--methods", "early_exit", "--exit-layers", "1,1")
    assert result.exit_code == 0, result.stderr
    assert "early_exit 1" in result.stdout
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {row["exit_layer"] for row in record["measured"]["table"]} == {1}
    assert (record["draft"], record["spec"]["exit_layer"]) == (None, 1)
    assert record["step_costs"] == [seen[0].step_seconds(length) for length in (0, 1)]
    used = invoke("generate", "--config", out, "--prompt", "ab", "--max-tokens", "4")
    assert used.exit_code == 0, used.stderr
    for options, told in (
        (["--methods", "early_exit"], "early_exit needs --exit-layers"),
        (["--methods", "mag", "--exit-layers", "1"], "--exit-layers"),
        (["--exit-layers", "two"], "--exit-layers"),
        (["--exit-layers", "0"], "--exit-layers: "),
    ):
        refused = invoke(*run, *options)
        assert refused.exit_code == 2
        assert told in refused.stderr
    assert invoke(*run, "--exit-layers", "9").exit_code == 1


def test_draft_bits(invoke, pair, tmp_path, prompts_file):
    """Quantized copies and drafts of each are tried; cascades are tried without a copy."""
    out = tmp_path / "tuned.json"
    run = ["tune", *pair, *SHORT, "-k", "1", "--prompts-file", prompts_file, "--out", out]
    result = invoke(*run, "--methods", "quantized,draft_model", "--draft-bits", "8,4")
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    tried = {(row["method"], row["draft_bits"]) for row in record["measured"]["table"]}
    drafts = {("draft_model", bits) for bits in (None, 8, 4)}
    assert tried == {("quantized", 8), ("quantized", 4)} | drafts
    for options, told in (
        (["--methods", "quantized"], "quantized needs --draft-bits"),
        (["--methods", "cascade", "--draft-bits", "8"], "--draft-bits: none of the methods uses"),
        (["--draft-bits", "5"], "--draft-bits"),
    ):
        refused = invoke("tune", *pair, "--out", out, *options)
        assert refused.exit_code == 2
        assert told in refused.stderr


@pytest.mark.parametrize(
    ("options", "method", "shape"),
    [
        (["--methods", "mag,cascade"], "cascade", {"k_matrix": [[1, 10], [0, 0]]}),
        (["--methods", "tree", "--tree-nodes", "3"], "tree", {"tree_nodes": 3}),
    ],
)
def test_what_has_a_shape_of_its_own_is_chosen(
    invoke, pair, tmp_path, prompts_file, monkeypatch, options, method, shape
):
    """No step costs, which are for a schedule, beside it."""

    def choose(self, tried):
        return Plan(next(m.spec for m in tried if m.spec.method == method), 1.5)

    monkeypatch.setattr(Planner, "choose", choose)
    monkeypatch.setattr(Planner, "confirm", lambda *_: 1.0)
    out = tmp_path / "tuned.json"
    run = ["tune", *pair, *SHORT, "-k", "1", "--prompts-file", prompts_file, "--out", out]
    result = invoke(*run, *options)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["step_costs"] is None
    assert {"method": method, **shape}.items() <= record["spec"].items()
    used = invoke("generate", "--config", out, "--prompt", "ab", "--max-tokens", "4")
    assert used.exit_code == 0, used.stderr


def test_options_that_nothing_reads_are_refused(invoke, prompts_file):
    run = ["tune", "--target", "nowhere", "--prompts-file", prompts_file, "--out", "x.json"]
    result = invoke(*run, "--suffix-tokens", "8")
    assert result.exit_code == 2
    assert "--suffix-tokens: " in result.stderr
    assert "prompt_lookup, mag, suffix" in result.stderr


@pytest.mark.parametrize(
    ("methods", "draft", "told"),
    [
        ("draft_model,glide", "plain", "glide cannot run --draft .*, which is a plain draft model"),
        (
            "tree,cascade,eagle3",
            "plain",
            "eagle3 cannot run --draft .*, which is a plain draft model",
        ),
        ("eagle3,draft_model", "eagle", "draft_model cannot run --draft .*, which is an EAGLE"),
        ("cascade", "plain,eagle", "cascade cannot run --draft .*, which is an EAGLE draft"),
        ("glide", "eagle", "glide cannot run --draft .*, which is an EAGLE draft"),
    ],
)
def test_drafts_of_another_kind_are_refused_at_once(
    invoke, model_folders, tmp_path, monkeypatch, methods, draft, told
):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(Planner, "measure", measure)
    write_folder(tmp_path / "eagle", random_model(num_hidden_layers=6))
    folders = {"plain": model_folders["draft"], "eagle": tmp_path / "eagle"}
    drafts = ",".join(str(folders[name]) for name in draft.split(","))
    run = ["tune", "--target", model_folders["target"], "--draft", drafts, "--tree-nodes", "3"]
    result = invoke(*run, "--methods", methods, "--out", tmp_path / "tuned.json")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.search(f"--methods: {told}", line)


def test_the_draft_that_a_target_comes_with():
    assert TuneOptions(methods=("glide",)).own_draft("tiny") == "tiny-glide"
    assert TuneOptions().own_draft("tiny") == "tiny-draft"
    assert TuneOptions(methods=("mag",)).own_draft("tiny") is None


def test_trees_and_copies_first(invoke, pair, tmp_path, prompts_file, monkeypatch):
    """Those that can be had are tried, and what is chosen is written whole."""
    monkeypatch.setattr(Planner, "choose", lambda self, tried: Plan(tried[-1].spec, 1.5))
    monkeypatch.setattr(Planner, "confirm", lambda *_: 1.0)
    out = tmp_path / "tuned.json"
    run = ["tune", *pair, *SHORT, "--prompts-file", prompts_file, "--out", out]
    more = ["--tree-nodes", "3", "--suffix-tokens", "4", "--methods", "draft_model,tree"]
    result = invoke(*run, *more)
    assert result.exit_code == 0, result.stderr
    assert "tree nodes 3 copies 4" in " ".join(result.stdout.replace("│", " ").split())
    record = json.loads(out.read_text(encoding="utf-8"))
    told = ("method", "k", "tree_nodes", "suffix_tokens")
    rows = {tuple(row[name] for name in told) for row in record["measured"]["table"] if row["k"]}
    chains = {("draft_model", k, None, copies) for k in (1, 2) for copies in (None, 4)}
    assert rows == chains | {("tree", k, 3, copies) for k in (1, 2) for copies in (None, 4)}
    assert record["spec"] == {
        "method": "tree",
        "num_speculative_tokens": 2,
        "tree_nodes": 3,
        "suffix_tokens": 4,
    }
    assert record["step_costs"] is None
    used = invoke("generate", "--config", out, "--prompt", "ab", "--max-tokens", "4")
    assert used.exit_code == 0, used.stderr


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("draft_model", [(4, None, None), (1, None, 8), (2, None, 8), (4, None, 8)]),
        ("mag", [(4, None, None)]),
        ("suffix", [(4, None, None), (1, 2, None), (2, 2, None)]),
        ("tree", [(1, 2, None), (2, 2, None), (1, 2, 8), (2, 2, 8)]),
    ],
)
def test_what_is_tried(method, sizes):
    options = TuneOptions(tree_nodes=(2,), suffix_tokens=8, num_speculative_tokens=4)
    specs = options.specs(method_named(method), "tiny", 1)
    assert [(s.num_speculative_tokens, s.tree_nodes, s.suffix_tokens) for s in specs] == sizes


def test_several_drafts(invoke, model_folders, tmp_path, prompts_file):
    out = tmp_path / "tuned.json"
    drafts = f"{model_folders['draft']},{model_folders['target']}"
    models = ["--target", model_folders["target"], "--draft", drafts, "--methods", "cascade"]
    result = invoke(
        "tune", *models, *SHORT[:2], *SHORT[4:], "--prompts-file", prompts_file, "--out", out
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    matrices = [row["k_matrix"] for row in record["measured"]["table"]]
    assert [[6, 0, 8], [0, 3, 8], [0, 0, 8]] in matrices
    assert record["draft"] in (None, drafts)  # none, if plain decoding was faster
    used = invoke("generate", "--config", out, "--prompt", "ab", "--max-tokens", "8")
    assert used.exit_code == 0, used.stderr


def test_options_override_the_file(invoke, bundled, tmp_path):
    spec = {"method": "draft_model", "num_speculative_tokens": 2}
    file = saved(tmp_path / "tuned.json", draft="tiny-draft", spec=spec)
    arguments = ["--prompt", "ab", "--max-tokens", "30", "--json"]

    def longest(*more):
        result = invoke("generate", "--config", file, *arguments, *more)
        assert result.exit_code == 0, result.stderr
        return len(json.loads(result.stdout)["stats"]["acceptance_histogram"]) - 1

    assert longest() <= 2
    assert longest("-k", "5") > 2


def test_a_file_for_another_target_is_noted(invoke, bundled, tmp_path, model_folders):
    file = saved(tmp_path / "tuned.json", spec={"method": "mag"})
    used = ["generate", "--config", file, "--prompt", "ab", "--max-tokens", "3"]
    assert invoke(*used).stderr == ""
    result = invoke(*used, "--target", model_folders["draft"])
    assert result.exit_code == 0
    told = f"{file} was tuned for the target tiny, not for {model_folders['draft']}"
    assert result.stderr == f"fastspec: note: {told}\n"


def test_a_schedule_uses_the_costs_of_the_file(invoke, bundled, tmp_path, monkeypatch):
    """Those of its drafter: of as many tokens as asked, but not of more, nor of another method."""
    spec = {"method": "draft_model", "num_speculative_tokens": 2}
    costs = [1.0, 99.0, 199.0]
    file = saved(tmp_path / "tuned.json", draft="tiny-draft", spec=spec, step_costs=costs)
    arguments = ["--prompt", "ab", "--max-tokens", "30", "--json", "--schedule", "adaptive"]
    seen = []
    make = Pacer.schedule

    def recorded(self, *given):
        seen.append(self.spec.step_costs)
        return make(self, *given)

    monkeypatch.setattr(Pacer, "schedule", recorded)
    for more, expected in (
        ([], (1.0, 99.0, 199.0)),
        (["-k", "1"], (1.0, 99.0)),
        (["-k", "3"], None),
        (["--method", "mag", "-k", "2"], None),
        (["--step-costs", "[1, 2, 3]"], (1.0, 2.0, 3.0)),
    ):
        result = invoke("generate", "--config", file, *arguments, *more)
        assert result.exit_code == 0, result.stderr
        assert seen.pop() == expected
    assert invoke("generate", "--config", file, *arguments[:-2]).exit_code == 0


def test_a_k_matrix_of_the_file(invoke, bundled, tmp_path):
    spec = {"method": "cascade", "k_matrix": [[1, 3], [0, 0]]}
    file = saved(tmp_path / "tuned.json", draft="tiny-draft", spec=spec)
    result = invoke("generate", "--config", file, "--prompt", "ab", "--max-tokens", "6", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["stats"]["acceptance_histogram"]) <= 1 + 4


def test_bench_reads_the_file(invoke, bundled, tmp_path):
    file = saved(tmp_path / "tuned.json", spec={"method": "mag", "num_speculative_tokens": 3})
    short = ["--num-prompts", "1", "--max-tokens", "4", "--repeats", "1"]
    result = invoke("bench", "--config", file, *short)
    assert result.exit_code == 0, result.stderr
    assert "mag, K=3" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tune"], "--out"),
        (["tune", "--out", "no/such/tuned.json"], "no/such"),
        (["tune", "--out", "a.json", "-k", "0"], "-k: "),
        (["tune", "--out", "a.json", "--methods", "none"], "method"),
        (["tune", "--out", "a.json", "--target", "b", "--methods", "draft_model"], "--draft"),
        (["tune", "--out", "a.json", "--max-tokens", "0"], "--max-tokens: "),
        (["tune", "--out", "a.json", "--temperature", "-1"], "temperature"),
        (["generate", "--config", "missing.json", "--prompt", "a"], "no such file"),
    ],
)
def test_usage_errors(invoke, bundled, arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line


def test_nothing_is_written_when_measuring_fails(invoke, pair, tmp_path, prompts_file):
    out = tmp_path / "tuned.json"
    short = ["--max-tokens", "3", "--prompts-file", prompts_file, "--out", out]
    result = invoke("tune", *pair, *short)
    assert result.exit_code == 1
    assert "--max-tokens: 3 is too few: each draft length" in result.stderr
    assert not out.exists()
