"""Rotary embeddings that depend on the length of a text: as for each text alone."""

from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.paged_model import cache_name

from ..models import EOS_ID, VOCAB_SIZE, perturbed, random_model
from .glide_models import random_glide
from .helpers import generated_greedily, hugging_face_greedy
from .probes import CountingCapture, target_runner, use_graphs

LIMIT = 24  # original_max_position_embeddings
NEW = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
# Far below, crossing while decoding (from far, from next to it, at it), above, and above by one.
LENGTHS = (5, 16, 23, 24, 40, 25)
PROMPTS = [list(range(start, start + n)) for start, n in enumerate(LENGTHS, 1)]

_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZES |= {"num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 96}
_SIZES |= {"vocab_size": VOCAB_SIZE, "bos_token_id": EOS_ID, "eos_token_id": None}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0 + 0.7 * i for i in range(8)],
}


def config_of(kind):
    sizes: dict[str, Any] = {
        **_SIZES,
        "pad_token_id": None,
        "original_max_position_embeddings": LIMIT,
    }
    if kind == "phi3":
        return Phi3Config(**sizes, rope_parameters=dict(_LONGROPE))
    if kind == "phimoe":
        scales = {"short_mscale": 1.1, "long_mscale": 2.5}
        experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
        return PhimoeConfig(**sizes, **experts, rope_parameters={**_LONGROPE, **scales})
    del sizes["original_max_position_embeddings"]
    if kind == "dynamic":
        parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        return LlamaConfig(**sizes, rope_parameters=parameters)
    return LlamaConfig(**sizes, rope_parameters=dict(_LONGROPE))


def set_limit(config, limit):
    config.rope_parameters["original_max_position_embeddings"] = limit
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = limit


def build(kind, seed=3):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module", params=["phi3", "phimoe", "llama"])
def case(request):
    model = build(request.param)
    with rereading(model):
        return model, [generated_greedily(model, prompt, NEW) for prompt in PROMPTS]


@contextmanager
def rereading(model):
    """Lets `generate` reread the whole text when it has dropped all keys.

    Before transformers 5.20 it reads only the last token, then and for every later token.
    """
    prepare = model.prepare_inputs_for_generation

    def prepared(input_ids, **kwargs):
        inputs = prepare(input_ids, **kwargs)
        if inputs.get(cache_name(model)) is None:
            inputs = prepare(input_ids, **kwargs | {"next_sequence_length": None})
        return inputs

    with patch.object(model, "prepare_inputs_for_generation", prepared):
        yield


def texts(engine, prompts=PROMPTS):
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


def test_factors_matter(case):
    model, expected = case
    set_limit(model.config, 96)
    try:
        others = [generated_greedily(model, prompt, NEW) for prompt in PROMPTS[1:]]
    finally:
        set_limit(model.config, LIMIT)
    assert sum(other != one for other, one in zip(others, expected[1:], strict=True)) >= 3


@pytest.mark.parametrize("chunk", [7, 512])
def test_batches_and_chunks(case, chunk):
    model, expected = case
    assert texts(Engine(model, config=EngineConfig(prefill_chunk_size=chunk))) == expected


@pytest.mark.parametrize("method", ["draft_model", "tree", "prompt_lookup"])
@pytest.mark.parametrize("num_draft", [1, 4])
def test_drafts_that_straddle_the_limit(case, method, num_draft):
    model, expected = case
    draft = None if method == "prompt_lookup" else perturbed(model, 0.02)
    spec = SpecConfig(method, num_speculative_tokens=num_draft)
    engine = Engine(model, draft, spec=spec)
    assert texts(engine) == expected
    if method == "draft_model":
        assert (engine.stats.acceptance_rate or 0) > 0.3


def test_preemption(case):
    model, expected = case
    config = EngineConfig(block_size=4, num_blocks=24, prefill_chunk_size=9)
    engine = Engine(model, perturbed(model, 0.02), config=config)
    assert texts(engine) == expected


def test_padded_passes(case):
    model, expected = case
    engine = Engine(model, perturbed(model, 0.02), config=EngineConfig(block_size=4))
    capture = CountingCapture()
    use_graphs(target_runner(engine), capture)
    assert texts(engine) == expected
    assert capture.num_captured


def test_glide_drafts_with_such_embeddings():
    model = build("llama")
    draft = random_glide(model, head_dim=16, rope_parameters=dict(_LONGROPE))
    expected = [hugging_face_greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert texts(Engine(model, draft, spec=SpecConfig("glide"))) == expected


def test_sampled_text_does_not_depend_on_the_batch(case):
    model, _ = case
    params = [SamplingParams(seed=i, max_tokens=NEW, ignore_eos=True) for i in range(len(PROMPTS))]
    together = Engine(model, build("llama", seed=9)).generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        alone = Engine(model, build("llama", seed=9)).generate([prompt], one)
        assert alone[0].token_ids == output.token_ids


def test_prefix_caching_needs_texts_of_one_kind(case):
    model, expected = case
    with pytest.raises(ValueError, match=r"prefix_caching: .*above 24 tokens.*max_model_len to 24"):
        Engine(model, config=EngineConfig(prefix_caching=True))
    engine = Engine(model, config=EngineConfig(prefix_caching=True, max_model_len=LIMIT))
    assert texts(engine, PROMPTS[:1])[0] == expected[0]
    with pytest.raises(ValueError, match="prefix_caching"):
        Engine(random_model("llama"), model, config=EngineConfig(prefix_caching=True))


def test_dynamic_frequencies_are_those_of_an_unused_model():
    model = build("dynamic")
    expected = [hugging_face_greedy(model, prompt, NEW) for prompt in PROMPTS]
    model(torch.arange(1, 121)[None])  # stretches them
    engine = Engine(model, perturbed(model, 0.02))
    assert texts(engine) == expected
    with pytest.raises(ValueError, match="max_model_len: 97"):
        Engine(model, config=EngineConfig(max_model_len=97))


def test_the_users_model_reads_as_before(case):
    model, _ = case
    ids = torch.tensor([PROMPTS[4]])
    before = model(ids).logits
    model(ids[:, :LIMIT])  # its last pass sets its buffers; the engine's last one differs
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    Engine(model).generate(PROMPTS[:1], GREEDY)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model(ids).logits, before)
