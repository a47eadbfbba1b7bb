"""Colossal-Inference's names: what is taken over, what is refused."""

import logging
from copy import copy

import pytest
import torch
from transformers import GenerationConfig

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig, compat

from ..models import byte_tokenizer, random_model, random_t5
from .helpers import GREEDY, hugging_face_greedy

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


# As the README files have them: of the engine, and of its speculative decoding.
PUBLISHED = {
    "dtype": torch.float16,
    "max_batch_size": 4,
    "max_input_len": 1024,
    "max_output_len": 512,
    "use_cuda_kernel": True,
}
PUBLISHED_SPEC = {
    "dtype": "fp16",
    "max_batch_size": 1,
    "max_input_len": 256,
    "max_output_len": 256,
    "prefill_ratio": 1.2,
    "block_size": 16,
    "max_n_spec_tokens": 5,
    "prompt_template": "vicuna",
}


def test_published_dictionaries(caplog):
    with caplog.at_level(logging.WARNING, "fastspec"):
        config = EngineConfig.from_colossal(PUBLISHED)
        assert "use_cuda_kernel has no effect" in caplog.text
        spec_config = EngineConfig.from_colossal(PUBLISHED_SPEC)
        assert "prefill_ratio has no effect: prompts are read between steps" in caplog.text
    assert config == EngineConfig(dtype="float16", max_batch_size=4, max_model_len=1536)
    template = spec_config.prompt_template
    assert spec_config == EngineConfig(
        dtype="float16",
        max_batch_size=1,
        max_model_len=512,
        max_n_spec_tokens=5,
        prompt_template=template,
    )
    assert template.endswith("USER: {input_text}\nASSISTANT: ")
    for name, dtype in {"bf16": "bfloat16", "fp32": "float32", torch.bfloat16: "bfloat16"}.items():
        assert EngineConfig.from_colossal({"dtype": name}).dtype == dtype
    for name, part in {"llama": "[/INST]", "baichuan": "<reserved_106> {input_text} "}.items():
        assert part in EngineConfig.from_colossal({"prompt_template": name}).prompt_template


def test_generation_config():
    """max_length counts the prompt, as in `generate`, and nothing samples unless asked to."""
    model, prompts = random_model("llama"), [[1, 2, 3], [40, 7] * 5]
    engine = Engine(model, tokenizer=byte_tokenizer())
    config = GenerationConfig(pad_token_id=0, eos_token_id=262, max_length=24, num_beams=1)
    outputs = engine.generate(prompts=prompts, generation_config=config)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == hugging_face_greedy(model, prompt, 24 - len(prompt))
    (output,) = engine.generate(prompts[1:], generation_config=GenerationConfig(eos_token_id=262))
    assert output.token_ids == hugging_face_greedy(model, prompts[1], 20)
    config = GenerationConfig(
        max_new_tokens=6, do_sample=True, temperature=0.7, num_return_sequences=2, min_new_tokens=6
    )
    (output,) = engine.generate("ab", generation_config=config)
    assert [len(sample.token_ids) for sample in output.outputs] == [6, 6]
    t5 = random_t5()
    generated = t5.generate(
        torch.tensor([prompts[1]]), max_length=9, do_sample=False, eos_token_id=None
    )
    (output,) = Engine(t5).generate(
        prompts[1:], generation_config=GenerationConfig(max_length=9, eos_token_id=99)
    )
    assert [0, *output.token_ids] == generated[0].tolist()


def test_the_models_generation_config_sets_what_is_left_open():
    model, prompt = random_model("llama"), [1, 2, 3]
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.cache_implementation = "hybrid"
    config = GenerationConfig(max_new_tokens=12, pad_token_id=0)
    mask = torch.ones(1, 3, dtype=torch.long)
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=mask, generation_config=copy(config)
    )
    engine = Engine(model)
    (output,) = engine.generate([prompt], generation_config=config)
    assert [*prompt, *output.token_ids] == expected[0].tolist()
    config.repetition_penalty = 1.0
    (output,) = engine.generate([prompt], generation_config=config)
    assert output.token_ids == hugging_face_greedy(random_model("llama"), prompt, 12)
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="got 2, as the model's generation_config has it"):
        engine.generate([prompt], generation_config=config)


LEAST = {
    "one alone": ({}, {"min_length": 14}),
    "together": ({}, {"min_length": 14, "min_new_tokens": 3}),
    "zero": ({}, {"min_length": 14, "min_new_tokens": 0}),
    "the model's length": ({"min_length": 14}, {"min_new_tokens": 3}),
    "the model's number": ({"min_new_tokens": 3}, {"min_length": 14}),
}


@pytest.mark.parametrize(("of_model", "own"), LEAST.values(), ids=LEAST)
def test_min_new_tokens_takes_precedence_over_min_length(of_model, own):
    """As in `generate`, whichever of the two configs has them."""
    model, prompt = random_model("llama"), [1, 2, 3]
    plain = hugging_face_greedy(model, prompt, 16)
    config = GenerationConfig(max_new_tokens=16, pad_token_id=0, eos_token_id=plain[5], **own)
    for name, value in of_model.items():
        setattr(model.generation_config, name, value)
    mask = torch.ones(1, 3, dtype=torch.long)
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=mask, generation_config=copy(config)
    )
    (output,) = Engine(model).generate([prompt], generation_config=config)
    assert [*prompt, *output.token_ids] == expected[0].tolist()
    is_short = "min_new_tokens" in of_model | own
    assert (len(output.token_ids) == plain.index(plain[5]) + 1) is is_short


def with_no_new_tokens():
    """What its constructor refuses, but an assignment does not."""
    config = GenerationConfig()
    config.max_new_tokens = 0
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GenerationConfig(num_beams=4), "generation_config: num_beams is not supported, got 4"),
        (GenerationConfig(no_repeat_ngram_size=2), "no_repeat_ngram_size"),
        (GenerationConfig(forced_eos_token_id=1), "forced_eos_token_id"),
        (GenerationConfig(min_new_tokens=3, stop_strings=["a"]), "with a minimum length"),
        (GenerationConfig(max_length=3), "max_length, 3, leaves no room after 3 tokens"),
        (with_no_new_tokens(), "max_new_tokens, 0, leaves no room after 3 tokens"),
        ({"max_length": 30}, "generation_config: expected a GenerationConfig, got dict"),
    ],
)
def test_generation_config_that_asks_for_something_else(config, named):
    engine = Engine(random_model("llama"))
    with pytest.raises(ValueError, match=named):
        engine.generate([[1, 2, 3]], generation_config=config)
    with pytest.raises(ValueError, match="params: expected None with generation_config"):
        engine.generate([[1, 2, 3]], GREEDY, generation_config=config)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tp_size": 2}, r"tp_size: expected 1 \(for tensor parallelism"),
        ({"use_cuda_kernel": "yes"}, "use_cuda_kernel: expected a bool"),
        ({"prefill_ratio": "1.2"}, "prefill_ratio: expected a number"),
        ({"dtype": "int8"}, "dtype: expected a torch dtype or one of float32, fp32"),
        ({"dtype": torch.float64}, "dtype"),
        ({"temperature": 0.5}, "temperature"),
        ({"max_batchsize": 2}, "max_batchsize: not supported here"),
        ({"max_input_len": None}, "max_input_len: expected an int >= 1, got None"),
        ({"tp_size": True}, r"tp_size: expected 1 \(.*scaling"),
        ({"no_repeat_ngram_size": 2}, r"no_repeat_ngram_size: expected 0 \(n-grams are not"),
        ({"forced_eos_token_id": 2}, r"forced_eos_token_id: expected None \("),
        ({"do_sample": False}, "do_sample: belongs to a request here; set it in SamplingParams"),
        ({"kv_cache_dtype": "fp32", "dtype": "fp16"}, "kv_cache_dtype: expected None, 'fp8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"max_input_len": 0, "max_output_len": 5}, "max_input_len"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_n_spec_tokens": 0}, "max_n_spec_tokens"),
        ({"prompt_template": "llama3"}, "prompt_template: expected a string with"),
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
    engine = Engine(model, model)
    with pytest.raises(
        ValueError, match=r"^n_spec_tokens: expected an int from 1 to 1024, got 99999"
    ):
        engine.enable_spec_dec(n_spec_tokens=99999)
    assert engine.drafters[None] == 5


NEUTRAL = {
    "tp_size": 1,
    "pp_size": 1,
    "kv_cache_dtype": None,
    "no_repeat_ngram_size": 0,
    "forced_eos_token_id": None,
    "beam_width": 1,
    "use_cuda_graph": False,
    "use_spec_dec": False,
}


def test_fields_whose_value_means_what_is_done_here():
    assert EngineConfig.from_colossal(NEUTRAL) == EngineConfig()
    assert EngineConfig.from_colossal({"max_input_len": 100}).max_model_len == 356
    assert EngineConfig.from_colossal({"max_output_len": 100}).max_model_len == 356
    assert EngineConfig.from_colossal({"kv_cache_dtype": "fp8"}).kv_cache_dtype == "float8"
    same = {"kv_cache_dtype": "fp16", "dtype": torch.float16}
    assert EngineConfig.from_colossal(same) == EngineConfig(dtype="float16")


def test_presets_of_requests():
    """Greedy unless do_sample, and never longer than max_output_len."""
    greedy = SamplingParams(temperature=0, max_tokens=256)
    assert compat.InferenceConfig().params == greedy
    preset = {"do_sample": False, "top_k": 50, "top_p": 1.0, "temperature": 0.3}
    assert compat.InferenceConfig(**preset, **NEUTRAL).params == greedy
    config = compat.InferenceConfig(do_sample=True, temperature=0.7, max_output_len=9)
    assert config.params == SamplingParams(temperature=0.7, top_k=50, max_tokens=9)
    assert compat.InferenceConfig(do_sample=True, top_k=3).params.top_k == 3
    config = compat.InferenceConfig(repetition_penalty=1.3, ignore_eos=True, max_output_len=4)
    assert config.params.repetition_penalty == 1.3
    assert config.params.ignore_eos
    for fields in ({"do_sample": 1}, {"temperature": "hot"}, {"top_k": -5}, {"ignore_eos": "no"}):
        with pytest.raises(ValueError, match=f"^{next(iter(fields))}: "):
            compat.InferenceConfig(**fields)


def test_published_calls():
    """`generate(prompts)` of the quick start is greedy, whatever draws the random seed."""
    model, prompts = random_model("llama"), [[1, 2, 3], [40, 7] * 5]
    config = compat.InferenceConfig(max_output_len=12, max_input_len=30)
    engine = compat.InferenceEngine(model, byte_tokenizer(), config)
    expected = [[*o.token_ids] for o in Engine(model).generate(prompts, config.params)]
    assert [[*output.token_ids] for output in engine.generate(prompts)] == expected
    texts, ids = engine.generate(prompts_token_ids=prompts, return_token_ids=True)
    assert ids == expected
    assert [type(text) for text in texts] == [str, str]
    added = engine.add_request(prompts=["ab", "c"])
    added.append(engine.add_request([1, 2, 3]))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {e.request_id: e.output for e in engine.step() if e.output}
    assert set(outputs) == set(added)
    assert list(outputs[added[2]].token_ids) == expected[0]
    streamed = [token for event in engine.stream([1, 2, 3]) for token in event.token_ids]
    assert streamed == expected[0]
    for given in ({}, {"prompts": prompts, "prompts_token_ids": prompts}):
        with pytest.raises(ValueError, match=r"^prompts: expected either"):
            engine.generate(**given)


def test_loaded_drafts_are_converted():
    target, draft = random_model("llama"), random_model("llama")
    config = compat.InferenceConfig(dtype="bf16")
    engine = compat.InferenceEngine(target, byte_tokenizer(), config)
    engine.enable_spec_dec(draft, 3)
    assert draft.dtype == torch.bfloat16
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert output.stats.num_accepted_tokens > 0


def test_published_entries():
    """A loaded model is converted, where `Engine` refuses to."""
    model, config = random_model("llama"), compat.InferenceConfig(dtype="bf16", max_batch_size=2)
    with pytest.raises(ValueError, match=r"^dtype: 'bfloat16'"):
        Engine(model, config=config.engine)
    engine = compat.InferenceEngine(model, byte_tokenizer(), config, verbose=True)
    assert engine.config == EngineConfig(dtype="bfloat16", max_batch_size=2)
    (output,) = engine.generate([[1, 2]], GREEDY)
    assert len(output.token_ids) == GREEDY.max_tokens
    with pytest.raises(ValueError, match=r"^model_policy: "):
        compat.InferenceEngine(model, model_policy="llama")
