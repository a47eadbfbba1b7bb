"""An EAGLE-3 draft on the command line."""

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from fastspec import Engine, SpecConfig
from fastspec.models import named
from fastspec.models.named import BUNDLED, own_draft, usual_spec

from ..engine.eagle3_models import write_folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "eagle3"
    write_folder(folder, AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"]), num_known=500)
    return str(folder)


def test_generate_and_bench(invoke, draft, tmp_path):
    run = ["generate", "--prompt", "import os\n", "--max-tokens", "8", "--json"]
    run += ["--temperature", "0"]
    plain, chain = invoke(*run, "--method", "none"), invoke(*run, "--draft", draft)
    assert chain.exit_code == 0, chain.stderr
    outputs = [json.loads(result.stdout) for result in (plain, chain)]
    assert outputs[1]["token_ids"] == outputs[0]["token_ids"]
    assert outputs[1]["stats"]["num_draft_tokens"] > 0
    short = ["--method", "eagle3", "--draft", draft, "--num-prompts", "1", "--max-tokens", "4"]
    out = tmp_path / "results.jsonl"
    timed = invoke("bench", *short, "--repeats", "1", "--temperatures", "0", "--out", out)
    assert timed.exit_code == 0, timed.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["method"] == "eagle3"


def test_copies_first(invoke, draft):
    prompt = "import os\nimport sys\nimport os\nimport"
    run = ["generate", "--prompt", prompt, "--max-tokens", "12", "--json", "--temperature", "0"]
    plain = invoke(*run, "--method", "none")
    copied = invoke(*run, "--draft", draft, "--method", "eagle3", "-k", "2", "--suffix-tokens", "8")
    assert copied.exit_code == 0, copied.stderr
    outputs = [json.loads(result.stdout) for result in (plain, copied)]
    assert outputs[1]["token_ids"] == outputs[0]["token_ids"]
    assert outputs[1]["stats"]["num_accepted_tokens"] > 0  # of copies: the draft is random


def test_the_draft_that_a_target_comes_with_is_shown(invoke, draft, monkeypatch):
    def own(target, method):
        return draft if method == "eagle3" else None

    monkeypatch.setitem(named._USUAL, "tiny", named._USUAL["smollm2"])
    monkeypatch.setattr("fastspec.drafters.registry.own_draft", own)
    short = ["demo", "--num-prompts", "1", "--max-tokens", "8"]
    shown = invoke(*short)
    assert shown.exit_code == 0, shown.stderr
    told = " ".join(shown.stdout.split())
    assert "the EAGLE-3 draft proposes up to 3 tokens or copies up to 8 and the target" in told
    monkeypatch.delitem(named._USUAL, "tiny")
    monkeypatch.setattr("fastspec.cli.demo.own_draft", lambda target, method: None)
    shown = invoke(*short)
    assert shown.exit_code == 0, shown.stderr
    assert "suffix proposes up to 24 tokens" in shown.stdout


def test_trees_are_shown(invoke, draft):
    run = ["generate", "--prompt", "import os\n", "--max-tokens", "4", "--show-tree"]
    shown = invoke(*run, "--method", "eagle3", "--draft", draft, "--tree-nodes", "4")
    assert shown.exit_code == 0, shown.stderr


def test_what_it_cannot_do_is_refused(invoke, draft, tmp_path):
    run = ["generate", "--prompt", "x", "--method", "eagle3", "--draft", draft]
    refused = invoke(*run, "--tree-nodes", "4", "--cape")
    assert refused.exit_code == 2
    assert "cape" in refused.stderr
    stored = tmp_path / "run.jsonl"
    stored.write_text(json.dumps({"prompt": "import ", "token_ids": [5, 6]}), encoding="utf-8")
    simulated = invoke("simulate", stored, "--method", "eagle3", "--draft", draft)
    assert simulated.exit_code != 0
    assert "'eagle3' reads the target's hidden states" in simulated.stderr


def test_training_data_that_cannot_be_read_is_refused_first(invoke, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text('{"text": "\\ud800 abc"}\n', encoding="utf-8")
    for command in ("eagle3", "dflash", "draft", "glide"):
        refused = invoke("train", command, "--data", data, "--out", out)
        assert refused.exit_code != 0
        assert "data.jsonl, line 1: " in refused.stderr
        refused = invoke("train", command, "--data", data, "--out", out, "--context", "5000")
        assert refused.exit_code != 0
        assert "--context: expected at most" in refused.stderr
    assert not out.exists()


def test_smollm2_has_one_of_its_own():
    assert own_draft("smollm2", "eagle3") == "smollm2-eagle3"
    assert own_draft("smollm2", "glide") == "smollm2-glide"
    assert own_draft("tiny", "eagle3") is None
    assert own_draft("tiny", "dflash") is None


def test_auto_is_what_suits_the_draft_of_smollm2():
    given = SpecConfig(num_speculative_tokens=6, rejection_sample_method="coupled")
    spec = usual_spec(given, "smollm2", on_cpu=True)
    assert spec == replace(
        given, method="eagle3", confidence_threshold=0.3, suffix_tokens=8, draft_bits=8
    )
    for options in ({"schedule": "adaptive"}, {"cape": True}):
        spec = usual_spec(SpecConfig(**options), "smollm2", on_cpu=False)
        assert (spec.num_speculative_tokens, spec.suffix_tokens) == (3, 8)
        assert spec.confidence_threshold is spec.draft_bits is None
    costs = SpecConfig(schedule="adaptive", step_costs=(1, 2, 3, 4, 5, 6))
    assert usual_spec(costs, "smollm2", on_cpu=True).num_model_tokens() == 5
    for spec, target in (
        (SpecConfig("none"), "smollm2"),
        (SpecConfig(), "tiny"),
        (SpecConfig(), 3),
    ):
        assert usual_spec(spec, target, on_cpu=True) is spec


def test_an_engine_takes_the_usual_options_of_its_target(monkeypatch):
    monkeypatch.setitem(
        named._USUAL, "tiny", {"method": "draft_model", "num_speculative_tokens": 2}
    )
    assert Engine("tiny").drafters == {None: 2, "none": 0}
    assert Engine("tiny", "tiny-draft").drafters[None] == 5
    assert Engine("tiny", spec="suffix").drafters[None] == SpecConfig("suffix").num_draft_tokens()


def test_tune(invoke, draft, tmp_path):
    """An EAGLE-3 draft is tried as one, and named in the file if it is chosen."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tuned.json"
    prompts.write_text("def f(\n", encoding="utf-8")
    run = ["tune", "--draft", draft, "--prompts-file", prompts, "--out", out, "--max-tokens", "16"]
    tuned = invoke(*run, "-k", "1", "--repeats", "1")
    assert tuned.exit_code == 0, tuned.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    tried = {row["method"] for row in record["measured"]["table"]}
    assert tried == {"eagle3", "prompt_lookup", "mag", "suffix"}
    refused = invoke(*run, "--methods", "draft_model")
    assert refused.exit_code == 2
    assert "which is an EAGLE draft" in " ".join(refused.stderr.split())
