"""Colossal-Inference's names: what is taken over, what is refused."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import byte_tokenizer, random_model

FIELDS = {
    "max_batch_size": 4,
    "max_input_len": 50,
    "max_output_len": 20,
    "block_size": 8,
    "max_n_spec_tokens": 3,
    "prompt_template": "<{input_text}>",
}


def test_fields_that_mean_something():
    config = EngineConfig.from_colossal(FIELDS)
    assert config == EngineConfig(
        max_batch_size=4,
        max_model_len=70,
        block_size=8,
        max_n_spec_tokens=3,
        prompt_template="<{input_text}>",
    )
    assert EngineConfig.from_colossal({}) == EngineConfig()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tp_size": 2}, "tp_size: has no meaning here"),
        ({"use_cuda_kernel": True}, "use_cuda_kernel"),
        ({"temperature": 0.5}, "temperature"),
        ({"max_batchsize": 2}, "max_batchsize"),
        ({"max_input_len": 5}, "max_output_len: expected an int >= 1, got None"),
        ({"max_input_len": 0, "max_output_len": 5}, "max_input_len"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_n_spec_tokens": 0}, "max_n_spec_tokens"),
        ({"prompt_template": "llama"}, "prompt_template: expected a text with"),
    ],
)
def test_fields_that_mean_nothing_or_are_out_of_range(fields, named):
    with pytest.raises(ValueError, match=named):
        EngineConfig.from_colossal(fields)


def test_template_is_put_around_texts_and_not_around_ids():
    model, tokenizer = random_model("llama"), byte_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=3)
    config = EngineConfig(prompt_template="say {input_text}, {input_text}!")
    engine = Engine(model, tokenizer=tokenizer, config=config)
    wrapped = engine.generate("a {x} b", params)[0]
    assert tokenizer.decode(wrapped.prompt_token_ids) == "say a {x} b, a {x} b!"
    assert engine.generate([[1, 2]], params)[0].prompt_token_ids == (1, 2)


def test_most_draft_tokens():
    model = random_model("llama")
    config = EngineConfig.from_colossal({"max_n_spec_tokens": 3})
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens: .* at most max_n_spec_tokens, 3"
    ):
        Engine(model, model, spec=SpecConfig(num_speculative_tokens=4), config=config)
    engine = Engine(model, model, spec=SpecConfig(num_speculative_tokens=3), config=config)
    with pytest.raises(ValueError, match=r"n_spec_tokens: .* at most max_n_spec_tokens, 3"):
        engine.enable_spec_dec(n_spec_tokens=4)
    engine.enable_spec_dec(n_spec_tokens=2)
