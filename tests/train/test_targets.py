"""Drafts for targets whose layers differ, keep no cache, or compute their weights."""

from copy import deepcopy

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.train.data import cut_rows
from fastspec.train.eagle3 import Eagle3Trainer, make_eagle3
from fastspec.train.new_drafts import make_draft, make_plain, weights_of
from fastspec.train.options import DraftShape, TrainOptions
from fastspec.train.processes import OneProcess
from fastspec.train.run import report_acceptance, train_draft
from fastspec.train.states import cut_texts, train_on_states

from ..architectures import config_of, random_decoder
from ..models import random_model

DOCUMENTS = [[5 + (7 * i * i + 3 * n) % 250 for i in range(40)] for n in range(6)]
SHAPE = DraftShape(context=24)
PROMPT = DOCUMENTS[0][:9]


def decoder(name, **overrides):
    """A tiny random one, of tests.architectures or tests.models."""
    if name in ("gpt2", "bloom", "mamba", "falcon_h1", "llama"):
        return random_model(name, **overrides)
    return random_decoder(config_of(name, **overrides))


def greedy(engine):
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))
    return output.token_ids


def trained(target, kind, folder, reduced=None, **options):
    """A folder with a draft after two steps, and its record."""
    rows = cut_rows(DOCUMENTS, SHAPE.context)
    shape = DraftShape(context=24, reduced_vocab_size=reduced)
    draft = make_draft(target, rows, shape, kind)
    settings = TrainOptions(steps=2, batch_size=2, **options)
    given = settings, folder, OneProcess(target.device), False, lambda *step: None
    train_draft(target, draft, rows, *given)
    spec = SpecConfig("glide" if kind == "glide" else "draft_model", 3)
    return report_acceptance(target, rows, spec, folder)


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("gemma3n_text", "plain", {}),
        ("gemma3n_text", "plain", {"reduced": 64, "distillation": 1.0}),
        ("gemma4_text", "plain", {}),
        ("gemma4_text", "glide", {"store_target": True}),
        ("falcon_h1", "plain", {}),
        ("mamba", "plain", {"store_target": True}),
        ("mamba", "plain", {"reduced": 64, "distillation": 1.0}),
    ],
)
def test_targets_that_drafts_learn_from(tmp_path, name, kind, options):
    target = decoder(name)
    assert trained(target, kind, tmp_path, **options)["held_out_prompts"] > 0
    method = "glide" if kind == "glide" else "draft_model"
    assert greedy(Engine(target, tmp_path, spec=SpecConfig(method, 3))) == greedy(Engine(target))


def test_a_draft_is_as_wide_as_the_last_layer():
    target = decoder("gemma3n_text", intermediate_size=[48, 48, 48, 64])
    assert make_plain(target).config.intermediate_size == 64
    assert make_plain(decoder("gemma4_text")).config.head_dim == 512
    assert make_plain(decoder("mamba", hidden_size=192)).config.num_attention_heads == 3


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "gemma3n_text",
            "glide",
            "Gemma3nForCausalLM gave keys of 0 layers, but the draft needs 1",
        ),
        ("deepseek_v3", "glide", "DeepseekV3ForCausalLM keeps keys of 1 heads of size 16, but a"),
        ("mimo_v2_flash", "glide", "MiMoV2FlashForCausalLM keeps keys of 4 heads of size 16, but"),
        (
            "falcon_h1",
            "glide",
            "FalconH1ForCausalLM has recurrent layers, which a GLIDE draft cannot learn",
        ),
        ("mamba", "glide", "MambaForCausalLM has no attention that GLIDE could read"),
    ],
)
def test_targets_whose_cache_glide_cannot_read_are_refused_before_training(name, kind, message):
    with pytest.raises(ValueError, match=f"^target: {message}"):
        make_draft(decoder(name), cut_rows(DOCUMENTS, 24), SHAPE, kind)


def test_a_target_that_the_engine_does_not_run_is_refused_before_training():
    for kind in ("plain", "glide"):
        with pytest.raises(ValueError, match=r"^BloomForCausalLM: never calls"):
            make_draft(decoder("bloom"), cut_rows(DOCUMENTS, 24), SHAPE, kind)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "GPT2LMHeadModel has no list of decoder layers"),
        ("mamba", "MambaForCausalLM has 2 layers, too few for EAGLE-3 to read three"),
        ("gemma3n_text", "Gemma3nForCausalLM passes its layers more than a hidden state per token"),
    ],
)
def test_targets_that_eagle3_cannot_read_are_refused_before_training(tmp_path, name, message):
    target, texts = decoder(name), cut_texts([(ids, 1) for ids in DOCUMENTS], 24)

    def train():
        draft = make_eagle3(target, texts, SHAPE)
        given = TrainOptions(steps=1), tmp_path, False, pytest.fail
        train_on_states(Eagle3Trainer, target, draft, texts[1:], texts[:1], *given)

    with pytest.raises(ValueError, match=f"^target: {message}"):
        train()


def test_a_shape_that_no_llama_has_is_refused():
    with pytest.raises(
        ValueError, match=r"^target: a draft cannot have its shape: .*\(50\) is not"
    ):
        make_plain(random_model("llama"), hidden_size=50)


def linear_layers(model):
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def test_drafts_start_from_weights_that_the_target_computes():
    target = random_model("llama")
    plain = make_plain(deepcopy(target))
    for layer in linear_layers(target):
        parametrizations.weight_norm(layer)
    draft = make_plain(target)
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(draft.get_parameter(name), weight)


def test_pruned_weights_are_those_that_are_used():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    prune.l1_unstructured(layer[0], "weight", 0.5)
    weights = dict(weights_of(layer))
    assert torch.equal(weights["0.weight"], layer[0].weight)
    assert (weights["0.weight"] == 0).sum() == 8
