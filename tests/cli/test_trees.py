"""Token trees on the command line."""

import json

import pytest


def options(model_folders):
    return ["--target", str(model_folders["target"]), "--draft", str(model_folders["draft"])]


@pytest.mark.parametrize("form", [["--method", "tree", "--tree-nodes", "9"], ["--cape"]])
def test_generate_draws_the_tree_of_each_step(invoke, model_folders, form):
    run = ["generate", *options(model_folders), "--prompt", "abc", "--max-tokens", "12"]
    run += ["--ignore-eos", "--temperature", "0"]
    plain = invoke(*run, "--json")
    shown = invoke(*run, *form, "--json")
    assert json.loads(shown.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    stats = json.loads(shown.stdout)["stats"]
    drawn = invoke(*run, *form, "--show-tree")
    lines = drawn.stdout.splitlines()
    titles = [line for line in lines if line.startswith("step ")]
    assert stats["num_steps"] - 1 <= len(titles) <= stats["num_steps"]  # the last may need none
    assert "after 'c'" in titles[0]
    assert sum(" + " in line for line in lines) >= stats["num_accepted_tokens"]
    assert any(" - " in line for line in lines)


@pytest.mark.parametrize("form", [[], ["--method", "mag"], ["--cape", "--json"]])
def test_show_tree_needs_trees(invoke, model_folders, form):
    result = invoke("generate", "--prompt", "abc", "--show-tree", *form)
    assert result.exit_code == 2
    assert "--show-tree" in result.stderr


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (["--cape", "--cape-bins", "[[1,"], "--cape-bins: expected pairs like"),
        (["--cape", "--cape-bins", "[[0.5,1]]"], "--cape-bins: expected probabilities above 0"),
        (["--cape-bins", "[[1,1]]"], "--cape-bins: only with cape"),
    ],
)
def test_bins_that_cannot_be_used(invoke, form, named):
    result = invoke("generate", "--prompt", "abc", *form)
    assert result.exit_code == 2
    assert named in result.stderr


CAPE = ["--cape", "--cape-bins", "[[0.5,2],[1,0]]"]


@pytest.mark.parametrize("form", [["--method", "tree", "--tree-width", "2"], CAPE])
def test_demo_and_bench(invoke, bundled, tmp_path, form):
    short = ["--num-prompts", "1", "--max-tokens", "6"]
    shown = invoke("demo", *short, *form)
    assert shown.exit_code == 0, shown.stderr
    assert "a tree, 5 tokens deep" in shown.stdout
    assert "identical" in shown.stdout
    out = tmp_path / "record.jsonl"
    run = invoke("bench", *short, *form, "--repeats", "1", "--out", str(out))
    assert run.exit_code == 0, run.stderr
    record = json.loads(out.read_text())
    assert record["cape"] == (form == CAPE)
    assert record["cape_bins"] == ([[0.5, 2], [1, 0]] if record["cape"] else None)
    assert record["tree_width"] == (None if record["cape"] else 2)
    assert record["verified"]
