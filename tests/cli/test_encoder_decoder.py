"""Folders with encoder-decoders on the command line."""

import json

import pytest

from ..models import byte_tokenizer, perturbed, random_t5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoder-decoders")
    target = random_t5(vocab_size=263)
    for name, model in (("target", target), ("draft", perturbed(target, 0.02))):
        model.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return ["--target", root / "target", "--draft", root / "draft"]


def records(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate(invoke, folders):
    common = ["generate", "--json", "--prompt", "a house", "--prompt", "two", "--max-tokens", "12"]
    common += ["--temperature", "0"]
    plain = records(invoke(*common, *folders[:2]))
    assert all(0 < len(record["token_ids"]) <= 12 for record in plain)
    for options in (folders, [*folders[:2], "--method", "mag"]):
        drafted = records(invoke(*common, *options))
        assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
        assert sum(record["stats"]["num_draft_tokens"] for record in drafted) > 0


def test_stored_outputs_have_the_limit_of_the_run(invoke, folders, tmp_path):
    file, prompt = tmp_path / "run.jsonl", "a house " * 5
    limits = ["--max-model-len", "64", "--max-tokens", "60", "--temperature", "0", "--ignore-eos"]
    given = ["--prompt", prompt, "--save-outputs", file]
    records(invoke("generate", "--json", *folders, *limits, *given))
    (stored,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert len(stored["prompt_token_ids"]) > 64 - 60
    assert len(stored["token_ids"]) == stored["max_tokens"] == 60


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_bench_against_hugging_face(invoke, folders, method, tmp_path):
    (tmp_path / "prompts.txt").write_text("a b c a b c\nhouse\n", encoding="utf-8")
    options = folders if method == "draft_model" else [*folders[:2], "--method", method]
    result = invoke(
        *("bench", *options, "--prompts-file", tmp_path / "prompts.txt"),
        *("--max-tokens", "8", "--repeats", "1", "--out", tmp_path / "record.jsonl"),
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads((tmp_path / "record.jsonl").read_text())
    assert record["verified"]
    assert record["target"]["architecture"] == "T5ForConditionalGeneration"


def test_a_glide_draft_needs_a_decoder(invoke, folders, tmp_path):
    target, out = folders[1], tmp_path / "glide"
    result = invoke("train", "glide", "--target", target, "--data", __file__, "--out", out)
    assert result.exit_code == 1
    assert "target: expected a decoder, got T5ForConditionalGeneration" in result.stderr
    assert not out.exists()
