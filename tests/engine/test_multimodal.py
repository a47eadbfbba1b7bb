"""Models that also take images or sound write what their `generate` writes without any."""

from copy import deepcopy

import pytest
import torch
from transformers import CONFIG_MAPPING

from fastspec import Engine, SamplingParams, SpecConfig, hf_generate

from ..architectures import PROMPTS, config_of, random_decoder
from ..models import byte_tokenizer
from .helpers import generated_greedily, ids_of

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SPECS = {
    "quantized": SpecConfig("quantized"),
    "early exit": SpecConfig("early_exit", exit_layer=2),
    "copies": SpecConfig("suffix"),
}


@pytest.fixture(scope="module")
def llava():
    """Its encoder of images has as many layers as its decoder."""
    config = config_of("llava")
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers
    return random_decoder(config)


@pytest.fixture(scope="module")
def expected(llava):
    return [list(generated_greedily(llava, prompt, NUM_TOKENS)) for prompt in PROMPTS]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_drafter_of_the_target_itself(llava, expected, spec):
    engine = Engine(llava, spec=spec)
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.num_draft_tokens > 0


def test_folders(llava, expected, tmp_path):
    llava.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), str(tmp_path))
    assert ids_of(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats.acceptance_rate == 1
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]
    with pytest.raises(ValueError, match="content: a string, or parts of type text"):
        engine.chat(image, GREEDY)


def test_hf_generate(llava, expected):
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    input_ids = torch.tensor(PROMPTS[:1])
    ids = hf_generate(llava, input_ids, **options)
    assert ids[0].tolist() == PROMPTS[0] + expected[0]
    pixels = torch.zeros(1, 3, 28, 28)
    with pytest.raises(ValueError, match="pixel_values: not supported"):
        hf_generate(llava, input_ids, pixel_values=pixels, **options)


def test_marks_of_text_and_images():
    model = random_decoder(config_of("gemma3"))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    input_ids = torch.tensor(PROMPTS[:1])
    text = torch.zeros_like(input_ids)
    ids = hf_generate(model, input_ids, token_type_ids=text, **options)
    assert torch.equal(ids, model.generate(input_ids, **options))
    with pytest.raises(ValueError, match="token_type_ids: not supported"):
        hf_generate(model, input_ids, token_type_ids=text + 1, **options)


def test_positions_on_several_axes():
    model = random_decoder(config_of("qwen2_vl"))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    input_ids = torch.tensor([[0] * 3 + PROMPTS[0], PROMPTS[1][:7]])
    given = {"input_ids": input_ids, "attention_mask": (input_ids > 0).long()}
    given["mm_token_type_ids"] = torch.zeros_like(input_ids)
    assert torch.equal(hf_generate(model, given, **options), model.generate(**given, **options))
    positions = torch.arange(7).expand(4, 2, -1)
    with pytest.raises(ValueError, match="position_ids: expected those that follow from"):
        hf_generate(model, given, position_ids=positions, **options)


def test_encoders_of_another_dtype(llava):
    model = deepcopy(llava).to(torch.bfloat16)
    expected = ids_of(Engine(model).generate(PROMPTS, GREEDY))
    model.model.vision_tower.float()
    assert model.dtype == torch.float32
    assert ids_of(Engine(model, spec="suffix").generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("model_type", ["vit", "florence2"])
def test_what_is_no_language_model_is_refused_in_one_line(model_type, tmp_path):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no language model of type '{model_type}'$"):
        Engine(str(tmp_path))
