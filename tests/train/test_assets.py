"""The bundled models as shipped."""

import ast
import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastspec
from fastspec.drafters.auto import kind_of
from fastspec.drafters.glide import load_glide
from scripts.tiny.corpus import is_held_out
from scripts.tiny.prompts import read_prompts

ASSETS = Path(fastspec.__file__).parent / "assets"
MODELS = ("tiny-target", "tiny-draft")


def test_assets_stay_small():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 40e6


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bf16_and_load_as_float32(name):
    stored = load_file(ASSETS / name / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in stored.values())
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype="auto")
    assert model.dtype == torch.float32
    assert all(torch.equal(model.state_dict()[name], stored[name].float()) for name in stored)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 0


def test_target_is_deep_and_draft_is_shallow():
    layers = [json.loads((ASSETS / name / "config.json").read_text()) for name in MODELS]
    assert layers[0]["num_hidden_layers"] >= 20
    assert layers[1]["num_hidden_layers"] <= 2


def test_both_folders_hold_one_tokenizer():
    texts = [(ASSETS / name / "tokenizer.json").read_text() for name in MODELS]
    assert texts[0] == texts[1]
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / MODELS[0])
    for text in ("  lead", "\n\n\ttab\n", "☃ é don't , x !", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert 0 not in tokenizer.encode("no bos is added")


def test_prompts_come_from_held_out_files():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / MODELS[0])
    prompts = read_prompts(ASSETS / "prompts.jsonl")
    assert len(prompts) == len({prompt["id"] for prompt in prompts}) == 32
    assert all(is_held_out(prompt["source"]) for prompt in prompts)
    for kind in ("code/", "page/"):
        assert sum(prompt["source"].startswith(kind) for prompt in prompts) == 16
    assert all(60 <= len(tokenizer.encode(prompt["text"])) <= 200 for prompt in prompts)


def test_card_is_made_from_the_record():
    record = json.loads((ASSETS / "record.json").read_text())
    card = (ASSETS / "MODEL_CARD.md").read_text()
    assert f"{record['target']['tokens']:,}" in card
    overall = [row for row in record["evaluation"] if row["prompts"] == "all"]
    greedy = next(row for row in overall if row["temperature"] == 0)
    assert f"{greedy['acceptance_rate']:.3f}" in card
    assert greedy["acceptance_rate"] >= 0.6


def looping(ids, longest_period=64, least=12):
    """The part of a text in loops: where a whole period, `least` tokens or more, is as before."""
    marked = set()
    for period in range(1, longest_period + 1):
        run = 0
        for place in range(period, len(ids)):
            run = run + 1 if ids[place] == ids[place - period] else 0
            if run > max(period, least):
                marked.add(place)
    return len(marked) / len(ids)


def test_greedy_text_does_not_loop():
    prompts = [prompt["text"] for prompt in read_prompts(ASSETS / "prompts.jsonl")[::2]]
    prompts += [
        "import os\n",
        "class Stack:\n",
        "def main():\n",
        "def read_lines(path):\n",
        "x = 1",
    ]
    params = fastspec.SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    outputs = fastspec.Engine("tiny").generate(prompts, params)
    parts = [looping(output.token_ids) for output in outputs]
    assert sum(parts) / len(parts) < 0.1
    assert max(parts) < 0.5


def test_what_a_newcomer_sees_is_python():
    params = fastspec.SamplingParams(temperature=0, max_tokens=400)
    prompts = ["class Stack:\n", "def read_lines(path):\n", "def mean(values):\n", "def main():\n"]
    for prompt, output in zip(
        prompts, fastspec.Engine("tiny").generate(prompts, params), strict=True
    ):
        assert output.finish_reason == "stop"
        ast.parse(prompt + output.text)


def test_glide_beats_a_plain_draft_as_large():
    """By the acceptance that the stage measured for both: a fifth less is rejected, at least."""
    record = json.loads((ASSETS / "record.json").read_text())["glide"]
    for temperature in (0, 1):
        rows = [row for row in record["evaluation"] if row["temperature"] == temperature]
        rejected = {row["draft"]: 1 - row["acceptance_rate"] for row in rows}
        assert rejected["glide"] <= 0.8 * rejected["plain"]
    assert record["glide"]["parameters"] == record["plain"]["parameters"]
    assert record["glide"]["tokens"] == record["plain"]["tokens"]


def test_glide_learnt_to_read_the_target():
    """The engine accepts more of its drafts than of the same draft with its glimpses cut off."""
    prompts = [prompt["text"] for prompt in read_prompts(ASSETS / "prompts.jsonl")[::8]]
    params = fastspec.SamplingParams(temperature=0, max_tokens=32)
    draft = load_glide("tiny-glide", fastspec.EngineConfig())
    blind = deepcopy(draft)
    for layer in blind.model.layers:
        layer.cross_attn.o_proj.weight.data.zero_()
    rates = []
    for glide in (draft, blind):
        engine = fastspec.Engine("tiny", glide, spec=fastspec.SpecConfig("glide", 4))
        engine.generate(prompts, params)
        rates.append(engine.stats.acceptance_rate)
    assert rates[0] > rates[1] + 0.1


def test_the_glide_draft_of_smollm2_is_small_and_leaves_its_ends_to_the_target():
    folder = ASSETS / "smollm2-glide"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
    assert kind_of(folder) == "glide"
    stored = load_file(folder / "model.safetensors")
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & stored.keys()
    assert len(stored["lm_head.token_ids"]) == 8192
    matrices = [name.removesuffix(".scale") for name in stored if name.endswith(".scale")]
    assert {stored[name].dtype for name in matrices} == {torch.int8}
    assert all(weight.isfinite().all() for weight in stored.values())
    record = json.loads((folder / "record.json").read_text())
    assert f"{record['steps']:,} steps" in (ASSETS / "MODEL_CARD.md").read_text()


def test_the_eagle3_draft_is_small_and_leaves_its_ends_to_the_target():
    folder = ASSETS / "smollm2-eagle3"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6
    assert kind_of(folder) == "eagle3"
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    token_ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
    assert stored["t2d"].nonzero()[:, 0].tolist() == token_ids.tolist()
    assert len(token_ids) == config["draft_vocab_size"] == 8192
    assert not {"lm_head.weight", "embed_tokens.weight"} & stored.keys()
    weights = [weight for name, weight in stored.items() if name not in ("d2t", "t2d")]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in weights)
    record = json.loads((folder / "record.json").read_text())
    assert f"{record['steps']} steps" in (ASSETS / "MODEL_CARD.md").read_text()
