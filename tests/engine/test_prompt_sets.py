"""Templates of data sets, from a file; without `datasets` the error says what is missing."""

import json
import sys
from types import SimpleNamespace

import pytest

from fastspec.tools.prompt_sets import PROMPT_SETS, load_prompts

MMLU = {"question": "2 + 2?", "choices": ["1", "2", "3", "4"], "answer": 3}
LETTERS = {"input": "2 + 2?", "A": "1", "B": "2", "C": "3", "D": "4", "target": "D"}
GSM8K = {"question": "2 + 2?", "answer": "#### 4"}
RECORDS = {
    "mmlu": MMLU,
    "mmlu_vicuna": MMLU,
    "sampled_mmlu": LETTERS,
    "gsm8k": GSM8K,
    "gsm8k_vicuna": GSM8K,
    "hellaswag": {"ctx": "A man sits", "endings": ["a", "b", "c", "d"], "label": "1"},
    "mt_bench": {"question_id": 81, "turns": ["Write a text.", "Shorter."]},
    "sharegpt": {
        "id": "QWJhYvA_0",
        "conversations": [
            {"from": "gpt", "value": "#### 4"},
            {"from": "human", "value": "2 + 2?"},
            {"from": "human", "value": "Shorter."},
        ],
    },
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n"},
}


def test_every_set_has_a_record_here():
    assert set(RECORDS) == set(PROMPT_SETS)


@pytest.mark.parametrize("name", RECORDS)
def test_templates(tmp_path, name):
    file = tmp_path / "set.jsonl"
    line = json.dumps(RECORDS[name])
    file.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    first, second = load_prompts(name, file)
    assert first == second
    asked = {"mt_bench": "Write a text.", "sharegpt": "2 + 2?"}
    asked |= {name: "2 + 2?" for name in RECORDS if "mmlu" in name or "gsm8k" in name}
    assert asked.get(name, first) in first
    assert not {"#### 4", "Shorter."} & {first}
    assert load_prompts(name, file, limit=1) == [first]


def test_a_list_in_one_file(tmp_path):
    """ShareGPT's form; conversations in which nobody asks are passed over."""
    file, record = tmp_path / "set.json", RECORDS["sharegpt"]
    silent = {"id": "1", "conversations": record["conversations"][:1]}
    asking = {"id": "2", "conversations": [{"from": "user", "value": "Why?"}]}
    file.write_text(json.dumps([silent, record, asking], indent=2), encoding="utf-8")
    assert load_prompts("sharegpt", file) == ["2 + 2?", "Why?"]
    assert load_prompts("sharegpt", file, limit=1) == ["2 + 2?"]
    file.write_text(json.dumps([record, {"conversations": 5}]), encoding="utf-8")
    with pytest.raises(ValueError, match="record 2 is not a record of sharegpt"):
        load_prompts("sharegpt", file)
    file.write_text("[1,", encoding="utf-8")
    with pytest.raises(ValueError, match="cut off or not JSON"):
        load_prompts("sharegpt", file)


def test_texts(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(RECORDS["mmlu"]), encoding="utf-8")
    question = "Question: 2 + 2?\n(A) 1 (B) 2 (C) 3 (D) 4\n"
    mmlu = f"{question} Answer: \n Let's think step by step. "
    assert load_prompts("mmlu", file) == [mmlu]
    vicuna = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant"
        " gives helpful, detailed, and polite answers to the user's questions. USER: "
    )
    asked = f"Answer the question step by step: {question} Answer: \n"
    assert load_prompts("mmlu_vicuna", file) == [f"{vicuna}{asked} ASSISTANT:"]
    file.write_text(json.dumps([LETTERS]), encoding="utf-8")
    for name in ("mmlu", "sampled_mmlu"):
        assert load_prompts(name, file) == [mmlu]
    gsm8k = "Reason the math question below step by step. Question: 2 + 2?.\n Answer: "
    for text in (json.dumps(GSM8K), json.dumps({"train": [], "test": [GSM8K]}, indent=1)):
        file.write_text(text, encoding="utf-8")
        assert load_prompts("gsm8k", file) == [gsm8k]
    asked = "Reason the math question step by step. Question: 2 + 2?\n Answer: "
    assert load_prompts("gsm8k_vicuna", file) == [f"{vicuna}{asked} ASSISTANT:"]
    file.write_text(json.dumps(RECORDS["humaneval"]), encoding="utf-8")
    assert load_prompts("humaneval", file) == ["def f():\n"]
    file.write_text('{"prompt": ["One.", "Two."]}', encoding="utf-8")
    assert load_prompts("mt_bench", file) == ["One."]
    file.write_text('{"prompt": "Compose"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1 is not a record of mt_bench.*list of turns"):
        load_prompts("mt_bench", file)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("record", ["{}", "5", "null", '["a"]'])
def test_records_of_another_kind(tmp_path, name, record):
    file = tmp_path / "set.jsonl"
    file.write_text(f"{json.dumps(RECORDS[name])}\n{record}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 2 is not a record of {name}"):
        load_prompts(name, file)


def test_bad_arguments(tmp_path):
    file = tmp_path / "set.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        load_prompts("mmlu", file)
    file.write_text(json.dumps(RECORDS["mmlu"]) + '\n{"quest', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: cut off or not JSON"):
        load_prompts("mmlu", file)
    with pytest.raises(ValueError, match="expected one of"):
        load_prompts("pile", file)
    with pytest.raises(ValueError, match="num_prompts"):
        load_prompts("mmlu", file, limit=0)
    file.write_text(json.dumps(RECORDS["mmlu"]), encoding="utf-8")
    with pytest.raises(ValueError, match="expected 2 prompts of mmlu, got 1"):
        load_prompts("mmlu", file, limit=2)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_prompts("mmlu", file)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("gsm8k", "sampled_mmlu"):
        with pytest.raises(ValueError, match="needs a file"):
            load_prompts(name)


def test_with_the_package(monkeypatch):
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return [RECORDS["gsm8k"]] * 3

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(load_prompts("gsm8k", limit=2)) == 2
    assert asked == [("openai/gsm8k", "main", "test")]


def test_without_a_network(monkeypatch):
    def load_dataset(*arguments, split):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="cannot download gsm8k, pass a file: no route to host"):
        load_prompts("gsm8k")
