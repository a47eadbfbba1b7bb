"""Training of DFlash drafts: what it trains is what drafting does, and it helps."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli import app
from fastspec.config import EngineConfig
from fastspec.drafters.dflash import load_dflash, save_dflash
from fastspec.train.dflash import DFlashTrainer, in_blocks, make_dflash
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.states import Text, stored_lessons, train_on_states

from ..architectures import config_of, random_decoder
from ..engine.helpers import GREEDY, PROMPTS, hugging_face_greedy, ids_of
from ..engine.probes import noted_drafts
from ..models import random_model
from .test_eagle3 import KNOWN, texts_of

BLOCK = 5


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_blocks_in_training_are_those_of_drafting(kind, tmp_path):
    """Also of two texts in one lesson, with blocks that end before their last token, and of targets
    that scale their embeddings."""
    target = random_decoder(config_of(kind))
    texts = [Text(torch.arange(5, 19), 4), Text(torch.arange(30, 53) * 7 % 255, 9)]
    draft = make_dflash(target, texts, DraftShape(layers=2, reduced_vocab_size=20), BLOCK)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if not name.startswith(("embed_tokens.", "lm_head.")):
                weight += 0.1 * torch.randn_like(weight)
    known = draft.lm_head.token_ids
    layers = draft.config.target_layers
    teacher = stored_lessons(target, layers, texts, known, tmp_path / "states")
    lesson = teacher(torch.tensor([0, 1]))
    trained: dict[int, dict[int, int]] = {}  # by the place of a block's first token, then by step
    for first in range(BLOCK):
        for step, (rows, places) in enumerate(in_blocks(draft, lesson, BLOCK - 1, first)):
            best = known[draft.lm_head.linear(rows).argmax(-1)]
            for place, token in zip(places.tolist(), best.tolist(), strict=True):
                trained.setdefault(place - step, {})[step] = token
    save_dflash(draft, tmp_path / "draft")
    spec = SpecConfig("dflash", num_speculative_tokens=BLOCK - 1)
    loaded = load_dflash(tmp_path / "draft", EngineConfig(), target)
    own = {name: x for name, x in draft.state_dict().items() if not name.startswith("embed_")}
    loaded.load_state_dict(own, strict=False)  # not rounded to bfloat16
    engine = Engine(target, loaded, spec=spec, config=EngineConfig(block_size=4))
    drafts = noted_drafts(engine)
    # With log-probabilities a prompt is read by a pass of its own, and then drafts follow it.
    options = {"max_tokens": 2 * BLOCK, "ignore_eos": True, "prompt_logprobs": 0}
    one = SamplingParams(temperature=0, **options)
    compared = 0
    begin = 0
    for text in texts:
        ids = text.token_ids.tolist()
        for place in range(text.start - 1, len(ids) - 1):
            guesses = trained[begin + place]
            drafts.clear()
            engine.generate([ids[: place + 1]], one)
            drafted = drafts[tuple(ids[: place + 1])]
            assert [guesses[step] for step in range(len(guesses))] == drafted[: len(guesses)]
            compared += len(guesses)
        begin += len(ids)
    assert compared > 60


def test_short_answers_have_blocks_at_every_step(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    texts = [Text(torch.arange(5, 14), 7), Text(torch.arange(20, 23), 1)]
    draft = make_dflash(target, texts, DraftShape(), 16)
    known, layers = draft.lm_head.token_ids, draft.config.target_layers
    lesson = stored_lessons(target, layers, texts, known, tmp_path / "states")(torch.tensor([0, 1]))
    for first in range(12):
        found = [places.tolist() for _, places in in_blocks(draft, lesson, 15, first)]
        assert {place < 9 for places in found for place in places} == {True, False}


def test_training_helps_and_goes_on_where_it_stopped(tmp_path):
    target = random_model("llama", num_hidden_layers=6)
    every = texts_of(target)
    held_out, texts = every[: len(every) // 5], every[len(every) // 5 :]

    def run(folder, steps, resume=False):
        torch.manual_seed(0)
        options = TrainOptions(steps=steps, batch_size=4, rate=5e-3, warmup=0.0)
        draft = make_dflash(target, texts, DraftShape(reduced_vocab_size=KNOWN), BLOCK)
        arguments = target, draft, texts, held_out, options, tmp_path / folder, resume
        return train_on_states(DFlashTrainer, *arguments, lambda *step: None)

    whole = run("whole", 24)
    before = run("start", 1)["sampled_acceptance"]
    assert sum(whole["losses"][-5:]) < sum(whole["losses"][:5]) - 1
    assert len(before) == BLOCK - 1
    assert all(old < new for old, new in zip(before, whole["sampled_acceptance"], strict=True))
    run("parts", 24)
    again = run("parts", 30, resume=True)
    assert again["steps"] == 30
    engine = Engine(target, tmp_path / "whole")
    assert engine.drafter is not None
    assert engine.drafter.name == "dflash"
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == [
        list(hugging_face_greedy(target, prompt)) for prompt in PROMPTS
    ]


def test_the_command(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("import os\n\ndef name(path):\n    return os.path.basename(path)\n" * 20)
    command = ["train", "dflash", "--data", str(data), "--out", str(tmp_path / "out")]
    sizes = ["--steps", "3", "--context", "64", "--batch-size", "4", "--vocab-size", "300"]
    result = CliRunner().invoke(app, [*command, *sizes, "--block-size", "4", "--held-out", "0.2"])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["steps"] == 3
    assert len(record["greedy_acceptance"]) == 3
    text = Engine("tiny", tmp_path / "out").generate("import os\n", GREEDY)[0]
    plain = Engine("tiny", spec="none").generate("import os\n", GREEDY)[0]
    assert text.token_ids == plain.token_ids
    texts = [Text(torch.arange(9))]
    with pytest.raises(ValueError, match="hidden_size"):
        make_dflash(random_model("llama"), texts, DraftShape(hidden_size=8), 4)
    with pytest.raises(ValueError, match="has one layer"):
        make_dflash(random_model("llama", num_hidden_layers=1), texts, DraftShape(), 4)
