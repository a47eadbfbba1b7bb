"""Encoder-decoders that cannot be used, and options that they cannot have, are refused by name."""

import re

import pytest
from transformers import BartConfig, BartForConditionalGeneration

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.encoder_decoder import EncoderDecoderModel
from fastspec.models.layout import Span
from fastspec.models.runner import ModelRunner

from ..models import byte_tokenizer, random_model, random_t5

DECODER, ENCODER_DECODER = (
    "LlamaForCausalLM (a decoder)",
    "T5ForConditionalGeneration (an encoder-decoder)",
)


@pytest.fixture(scope="module")
def model():
    return random_t5()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: is empty"),
        ([1, 100], "prompt: token id 100"),
        ("text", "prompt: a text needs"),
    ],
)
def test_prompts(model, prompt, message):
    engine = Engine(model)
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt], SamplingParams(max_tokens=3))
    assert not engine.has_unfinished


def test_drafts_of_the_other_kind(model):
    decoder = random_model("llama", vocab_size=100)
    for target, draft, kinds in (
        (model, decoder, (DECODER, ENCODER_DECODER)),
        (decoder, model, (ENCODER_DECODER, DECODER)),
    ):
        message = re.escape("drafter: {} cannot draft for {}".format(*kinds))
        with pytest.raises(ValueError, match=message):
            Engine(target, draft)
        engine = Engine(target)
        with pytest.raises(ValueError, match=message):
            engine.enable_spec_dec(draft)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert len(engine.generate([[5, 6]], params)[0].token_ids) == 3


def test_other_encoder_decoders():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 30}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    with pytest.raises(ValueError, match="BartForConditionalGeneration: T5, mT5 and umT5 are"):
        Engine(BartForConditionalGeneration(BartConfig(**sizes, **heads)))


def test_no_start_token():
    model = random_t5()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match=r"decoder_start_token_id of its config: .* got None"):
        Engine(model)
    model.generation_config.decoder_start_token_id = [7]
    with pytest.raises(ValueError, match=r"decoder_start_token_id of its config: .* got \[7\]"):
        Engine(model)


def test_float8_cache(model):
    with pytest.raises(ValueError, match="kv_cache_dtype: T5ForConditionalGeneration"):
        Engine(model, config=EngineConfig(kv_cache_dtype="float8", backend="reference"))


def test_prefix_caching(model):
    with pytest.raises(ValueError, match="prefix_caching: T5ForConditionalGeneration"):
        Engine(model, config=EngineConfig(prefix_caching=True))


def test_no_room_in_the_cache(model):
    engine = Engine(model, config=EngineConfig(block_size=4, num_blocks=4))
    with pytest.raises(ValueError, match="no room in the cache"):
        engine.generate([[5, 6]], SamplingParams(max_tokens=16))
    long_prompt = list(range(2, 100))
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    assert len(engine.generate([long_prompt], params)[0].token_ids) == 15


def test_spans_without_an_input(model):
    config = EngineConfig(block_size=4, prefill_chunk_size=16)
    runner = ModelRunner(EncoderDecoderModel(model, "auto"), 4, config)
    with pytest.raises(ValueError, match="needs an encoder_input"):
        runner.prefill([[0, 5]], [Span([0], 0, 2)])


def test_the_users_model_is_left_as_it_was():
    model = random_t5()
    model.train()
    Engine(model, tokenizer=byte_tokenizer(), spec=SpecConfig("mag"))
    names = {config._attn_implementation for config in (model.config, model.encoder.config)}
    assert names == {"eager"}
    assert model.training
    assert model.encoder.training
