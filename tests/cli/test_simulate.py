"""`fastspec simulate`: a run that generate stored is reproduced, and files are written whole."""

import json

import pytest
import torch

from ..models import byte_tokenizer

PROMPTS = ["--prompt", "def f(", "--prompt", "a b a b a", "--max-tokens", "30"]
GREEDY = ["-k", "4", "--temperature", "0"]
SAVE = ["generate", "--prompt", "a", "--seed", "0", "--save-outputs", "a.jsonl"]


@pytest.fixture
def stored(invoke, pair, tmp_path):
    """A stored greedy run with K = 4."""
    file = tmp_path / "run.jsonl"
    result = invoke("generate", *pair, *PROMPTS, *GREEDY, "--save-outputs", file, "--json")
    assert result.exit_code == 0, result.stderr
    return file, [json.loads(line)["stats"] for line in result.stdout.splitlines()]


def simulated(invoke, *arguments):
    result = invoke("simulate", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_stored_run_is_reproduced(invoke, pair, stored):
    file, lives = stored
    report = simulated(invoke, file, *pair, "-k", "4", "--max-batch-size", "1")
    assert report["num_reproduced"] == report["num_known"] == 2
    for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_output_tokens"):
        assert report[name] == sum(live[name] for live in lives)
    assert report["stored_with"] is None
    other = simulated(invoke, file, *pair, "-k", "1")
    assert other["num_reproduced"] == 0
    assert other["stored_with"] == {"method": "draft_model", "num_speculative_tokens": 4}


def test_a_run_of_another_kind_is_told_and_not_compared(invoke, pair, stored, tmp_path):
    file, _ = stored
    told = "The stored run used draft_model, K=4, so its accepted counts are not compared."
    for options in (["-k", "3"], ["--method", "mag", "-k", "4"], ["-k", "4", "--cape"]):
        shown = invoke("simulate", file, *pair[: 2 if "mag" in options else 4], *options).stdout
        assert told in shown
        assert "equal those" not in shown
    shown = invoke("simulate", file, *pair, "-k", "4").stdout
    assert "equal those of the stored run in 2 of 2 outputs." in shown
    tree = ["--method", "tree", "-k", "3", "--tree-nodes", "7", "--save-outputs", file]
    assert invoke("generate", *pair, *PROMPTS, *tree, "--temperature", "0").exit_code == 0
    shown = invoke("simulate", file, *pair, "-k", "3").stdout
    assert "The stored run used tree, K=3, tree_nodes=7, so" in " ".join(shown.split())
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    unknown = tmp_path / "unknown.jsonl"
    lines = (json.dumps({**record, "drafting": None}) + "\n" for record in records)
    unknown.write_text("".join(lines), encoding="utf-8")
    shown = " ".join(invoke("simulate", unknown, *pair, "-k", "1").stdout.split())
    assert "of 2 outputs; it may have used another drafter or other options." in shown
    unknown.write_text(json.dumps({**records[0], "drafting": {"method": "mag"}}), encoding="utf-8")
    result = invoke("simulate", unknown, *pair)
    assert "line 1, drafting: expected an object with method and" in result.stderr


def test_outputs_of_another_target_are_noted(invoke, pair, stored):
    file, _ = stored
    assert "outputs of the target" not in invoke("simulate", file, *pair).stderr
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {row["target"] for row in rows} == {str(pair[1])}
    others = [json.dumps(row | {"target": "another"}) for row in rows]
    file.write_text("\n".join(others), encoding="utf-8")
    assert "outputs of the target another, not of" in invoke("simulate", file, *pair).stderr


def test_printed_tensors_with_the_limit_of_their_run(invoke, pair, stored, tmp_path):
    """The texts ran to their end of 30 tokens; of a run with 40 they ended by themselves."""
    file, lives = stored
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tensors, prompts = tmp_path / "t.txt", tmp_path / "p.txt"
    tensors.write_text("".join(f"{torch.tensor([r['token_ids']])}\n" for r in records), "utf-8")
    prompts.write_text("def f(\na b a b a\n", encoding="utf-8")
    given = [tensors, *pair, "-k", "4", "--prompts-file", prompts]
    report = simulated(invoke, *given, "--max-tokens", "30")
    assert report["num_draft_tokens"] == sum(live["num_draft_tokens"] for live in lives)
    more = simulated(invoke, *given, "--max-tokens", "40")["num_draft_tokens"]
    assert more > report["num_draft_tokens"]
    assert simulated(invoke, *given, "--max-tokens", "7")["num_output_tokens"] == 14
    result = invoke("simulate", file, *pair, "--max-tokens", "40")
    assert result.exit_code == 1
    assert "--max-tokens: expected None, as the file has its own" in result.stderr


def test_trees(invoke, pair, tmp_path):
    file, tree = tmp_path / "run.jsonl", ["--method", "tree", "-k", "3", "--tree-nodes", "7"]
    live = [*tree, "--save-outputs", file]
    assert invoke("generate", *pair, *PROMPTS, *GREEDY, *live).exit_code == 0
    report = simulated(invoke, file, *pair, *tree)
    assert report["num_reproduced"] == report["num_known"] == 2


@pytest.mark.parametrize("method", ["prompt_lookup", "mag"])
def test_a_sampled_run_is_reproduced(invoke, pair, tmp_path, method):
    file = tmp_path / "run.jsonl"
    sampling = ["--temperature", "0.7", "--top-k", "2", "--seed", "3"]
    live = ["--method", method, "--save-outputs", file]
    assert invoke("generate", *pair[:2], *PROMPTS, *sampling, *live).exit_code == 0
    report = simulated(invoke, file, *pair[:2], "--method", method)
    assert report["num_reproduced"] == report["num_known"] == 2


def test_tables_and_the_log(invoke, pair, stored, tmp_path):
    file, lives = stored
    log = tmp_path / "matched.txt"
    seconds = ["--draft-seconds", "0.001", "--verify-seconds", "0.01"]
    result = invoke("simulate", file, *pair, "-k", "4", "--log", log, *seconds)
    assert result.exit_code == 0, result.stderr
    assert "those of the stored run in 2 of 2 outputs" in result.stdout
    assert "predicted tokens/s" in result.stdout
    matched = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(matched) == sum(live["num_steps"] for live in lives)
    assert [count for (count,) in matched].count(30) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matched.txt", "run.jsonl"]


def test_rows_side_by_side_in_the_log(invoke, pair, stored, tmp_path):
    """As the simulation of Decoding Speculative Decoding logs a batch; finished rows wait."""
    file, _ = stored
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    for log, options in ((one, []), (two, ["--log-rows", "2"])):
        assert invoke("simulate", file, *pair, "-k", "4", "--log", log, *options).exit_code == 0
    single = [json.loads(line)[0] for line in one.read_text(encoding="utf-8").splitlines()]
    end = single.index(30) + 1
    rows = [json.loads(line) for line in two.read_text(encoding="utf-8").splitlines()]
    for row, counts in zip(zip(*rows, strict=True), (single[:end], single[end:]), strict=True):
        assert list(dict.fromkeys(row)) == counts
    assert len(rows) == max(end, len(single) - end)


def test_means_by_prompt_and_the_best_k(invoke, pair, stored):
    file, lives = stored
    seconds = ["--draft-seconds", "0.001", "--verify-seconds", "0.01"]
    report = simulated(invoke, file, *pair, "-k", "4", *seconds)
    assert report["means_by_prompt"] == [live["mean_acceptance_length"] for live in lives]
    best = max(report["predicted"], key=lambda row: row["tokens_per_s"])
    shown = invoke("simulate", file, *pair, "-k", "4", *seconds).stdout
    assert f"Best K: {best['k']}" in shown
    assert "Tokens per pass, all outputs together: " in shown
    assert "Tokens per pass, each output by itself: " in shown
    free = ["--draft-seconds", "0", "--verify-seconds", "0.01"]
    shown = invoke("simulate", file, *pair, "-k", "2", *free).stdout
    assert "Best K: 2, the longest draft here" in shown


def test_a_cascade(invoke, pair, model_folders, tmp_path):
    file = tmp_path / "run.jsonl"
    drafts = f"{model_folders['draft']},{model_folders['target']}"
    cascade = ["--method", "cascade", "--k-matrix", "[[2,3,4],[0,1,4],[0,0,4]]", "--lenience", "2"]
    models = [*pair[:2], "--draft", drafts, *cascade]
    greedy = ["--temperature", "0", "--save-outputs", file, "--json"]
    live = invoke("generate", *models, *PROMPTS, *greedy)
    assert live.exit_code == 0, live.stderr
    report = simulated(invoke, file, *models)
    assert report["num_reproduced"] == report["num_known"] == 2
    passes = [json.loads(line)["stats"]["num_draft_passes"] for line in live.stdout.splitlines()]
    total = {name: sum(each[name] for each in passes) for name in passes[0]}
    assert report["num_draft_passes"] == total


def test_prompts_in_json_lines_of_any_name(invoke, pair, tmp_path):
    """As Decoding Speculative Decoding keeps them: hellaswag.json, a JSON object a line."""
    file, prompts = tmp_path / "target.txt", tmp_path / "hellaswag.json"
    file.write_text("tensor([[65, 66]])\n", encoding="utf-8")
    a_b = byte_tokenizer()("a b")["input_ids"]
    for name in ("hellaswag.json", "hellaswag.txt"):
        prompts = tmp_path / name
        prompts.write_text('{"prompt": "a b", "id": 3}\n', encoding="utf-8")
        save = tmp_path / "run.jsonl"
        told = invoke(
            *("generate", *pair, "--prompts-file", prompts, "--max-tokens", "2"),
            *("--temperature", "0", "--save-outputs", save),
        )
        assert told.exit_code == 0, told.stderr
        assert json.loads(save.read_text(encoding="utf-8"))["prompt_token_ids"] == a_b
        assert simulated(invoke, file, *pair, "--prompts-file", prompts)["num_outputs"] == 1


def test_predictions(invoke, pair, stored):
    seconds = ["--draft-seconds", "0.001", "--verify-seconds", "0.01"]
    report = simulated(invoke, stored[0], *pair, "-k", "4", *seconds)
    plain, one, *_ = report["predicted"]
    assert (plain["ratio"], plain["tokens_per_s"]) == (1.0, pytest.approx(100.0))
    assert one["tokens_per_s"] == pytest.approx((1 + report["rates"][0]) / 0.011)


def test_printed_tensors_with_prompts(invoke, pair, tmp_path):
    file, prompts = tmp_path / "target.txt", tmp_path / "prompts.txt"
    file.write_text("tensor([[65, 66,\n 67]])\ntensor([[68]])\n", encoding="utf-8")
    prompts.write_text("a\nb\n", encoding="utf-8")
    report = simulated(invoke, file, *pair, "--prompts-file", prompts)
    assert (report["num_outputs"], report["num_output_tokens"]) == (2, 4)
    assert report["num_known"] == 0


def test_a_plot(invoke, pair, stored, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "counts.png"
    assert invoke("simulate", stored[0], *pair, "--plot", plot).exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["counts.what", "counts", "counts.pgf"])
@pytest.mark.parametrize(
    "arguments",
    [["simulate", "run.jsonl"], ["train", "draft", "--data", "run.jsonl", "--out", "o"]],
)
def test_a_plot_of_another_format(invoke, tmp_path, monkeypatch, arguments, name):
    """It is refused before the file is even read."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.jsonl").write_text("{", encoding="utf-8")
    result = invoke(*arguments, "--plot", name)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastspec: error: --plot: expected a file whose suffix is one of ")
    assert line.endswith(f", got '{name}'")


def test_a_plot_without_matplotlib(invoke, pair, stored, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = invoke("simulate", stored[0], *pair, "--plot", tmp_path / "counts.png")
    assert result.exit_code == 2
    assert "plot: needs matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ('{"token_ids": [1], "prompt": "a"}\n{"token_i', 1, "line 2: cut off"),
        ("[1]\n", 1, "without a prompt"),
        ('{"token_ids": [999], "prompt": "a"}\n', 1, "token id 999"),
    ],
)
def test_bad_files_write_nothing(invoke, pair, tmp_path, content, code, named):
    file = tmp_path / "run.jsonl"
    file.write_text(content, encoding="utf-8")
    result = invoke("simulate", file, *pair, "--log", tmp_path / "log.txt")
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert named in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["simulate", "a.jsonl", "-k", "0"], "-k: "),
        (["simulate", "a.jsonl", "--method", "none"], "method"),
        (["simulate", "a.jsonl", "--draft-seconds", "1"], "--verify-seconds"),
        (
            ["simulate", "a.jsonl", "--draft-seconds", "1", "--verify-seconds", "0"],
            "--verify-seconds: ",
        ),
        (["simulate", "a.jsonl", "--log", "no/such/log.txt"], "no/such"),
        (["simulate", "a.jsonl", "--log-rows", "2"], "--log-rows: needs --log"),
        (
            [
                *("simulate", "a.jsonl", "--method", "cascade"),
                *("--draft-seconds", "1", "--verify-seconds", "1"),
            ],
            "--draft-seconds: not for cascades and trees",
        ),
        (["generate", "--prompt", "a", "--save-outputs", "a.txt"], ".jsonl"),
        (
            ["generate", "--prompt", "a", "--save-outputs", "a.jsonl", "--temperature", "1"],
            "--seed",
        ),
        *(
            ([*SAVE, *rule], "--save-outputs")
            for rule in (
                ["--repetition-penalty", "1.5"],
                ["--presence-penalty", "1"],
                ["--frequency-penalty", "1"],
                ["--logit-bias", '{"65": 2}'],
                ["--bad-words", "a"],
                ["--allowed-token-ids", "65"],
                ["--structured-outputs", '{"regex": "a"}'],
                ["--min-tokens", "3"],
                ["--temperature", "1", "--rejection-sample-method", "coupled"],
                ["--relaxed-acceptance", "1.5"],
                ["--synthetic-acceptance-rate", "0.5"],
            )
        ),
    ],
)
def test_usage_errors(invoke, pair, arguments, named):
    result = invoke(*arguments, *pair)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line
