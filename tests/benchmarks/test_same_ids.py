"""The comparison of our greedy ids with those of `generate`, on the bundled pair."""

import pytest

from benchmarks import report, same_ids
from fastspec import Engine, SpecConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.config.methods import methods
from fastspec.models.loading import load_tokenizer

from .records import ENVIRONMENT


def test_ids_are_compared_and_told():
    tokenizer = load_tokenizer("target", "tiny")
    prompts = [tokenizer(text).input_ids for text in ("import os\n", "def add(a, b):\n")]
    expected = same_ids.of_generate("tiny", prompts, max_tokens=12)
    rows = {}
    for name in ("none", "draft_model"):
        engine = Engine("tiny", spec=SpecConfig(name), config=same_ids.CONFIG)
        rows[name] = same_ids.compared(engine, prompts, expected, 12)
    assert rows["none"] == {"equal": 2, "tokens_per_step": 1.0}
    assert rows["draft_model"]["equal"] == 2
    assert rows["draft_model"]["tokens_per_step"] > 1
    expected[1][-1] += 1
    assert same_ids.compared(engine, prompts, expected, 12)["equal"] == 1
    record = {
        **ENVIRONMENT,
        "dtype": "float32",
        "num_prompts": 2,
        "num_tokens": 24,
        "methods": rows | {"eagle3, copies": rows["none"]},
        "most_by_copies": {"chat": 1.2, "edit": 2.0},
    }
    told = report.same_ids(record)
    assert "\n| plain decoding | 2 of 2 | 1.00 |" in told
    assert "\n| `eagle3`, copies | 2 of 2 | 1.00 |" in told
    assert "tokens per target step: chat 1.20, edit 2.00.\n" in told


def test_the_best_copies():
    prompt = [1, 2, 3, 1, 2, 4, 5, 2]
    assert same_ids.steps_with_best_copies(prompt, [4, 5, 6]) == 1  # not 3, 1, 2
    assert same_ids.steps_with_best_copies(prompt, [4, 5, 6, 7, 1, 2]) == 4  # new are 7 and 1
    assert same_ids.steps_with_best_copies([9], [8, 9, 8, 9, 8]) == 3
    (text,) = bundled_prompts(1, chat=True)
    assert same_ids.most_by_copies([text], [prompt], [[4, 5, 6]]) == {"chat": 3.0}


def test_every_method_of_the_package_is_compared():
    specs = same_ids.SPECS | same_ids.SPECS_OF_A_DRAFT
    left = {"auto", "mtp", "dflash", "gemma_assistant"}  # nothing for SmolLM2 has their drafts
    assert {spec.method for spec in specs.values()} == set(methods()) - left


def test_words_that_no_method_contains_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["same_ids", "draft_model"])
    with pytest.raises(SystemExit):
        same_ids.main()
    assert "no method contains 'draft_model'" in capsys.readouterr().err
