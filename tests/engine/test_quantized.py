"""Drafts by the target with weights of 4 or 8 bits, on its own pages: same output, exactly."""

import logging

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.tools.simulate import Simulator

from ..models import VOCAB_SIZE, random_model, random_t5
from .helpers import ALPHA, FILTERED, GREEDY, PROMPTS, hugging_face_greedy, p_value, small_model
from .probes import count_preemptions, draft_model_of, flat_model_of, target_runner


def spec_of(bits=None, count=4, **options):
    return SpecConfig("quantized", count, draft_bits=bits, **options)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*zip(["llama", "qwen3", "gemma2", "gpt_neox", "gpt_oss", "gpt2"], [4, 8] * 3, strict=True)],
)
def test_greedy_output_is_that_of_plain_decoding(kind, bits):
    model = random_model(kind)
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    engine = Engine(model, spec=spec_of(bits), config=EngineConfig(max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.acceptance_rate > 0.3
    assert {writer for output in outputs for writer in output.drafters} == {None, "quantized"}


@pytest.mark.parametrize(
    "config", [{"num_blocks": 30}, {"prefix_caching": True}, {"prefill_chunk_size": 5}]
)
@pytest.mark.parametrize("options", [{}, {"cape": True}, {"suffix_tokens": 6}])
def test_approximate_keys_and_values_never_reach_the_output(config, options):
    """Drafting writes to the target's pages, and 4 bits are far off: the target must overwrite
    whatever it wrote, also after preemption and in shared blocks."""
    model = random_model("llama")
    spec = spec_of(4, **options)
    engine = Engine(model, spec=spec, config=EngineConfig(block_size=4, **config))
    expected = [hugging_face_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
    assert 0.2 < engine.stats.acceptance_rate < 1.0


def test_the_pages_are_the_targets_and_weights_are_packed():
    model = random_model("llama", hidden_size=64, head_dim=16)
    engine = Engine(model, spec=spec_of(8))
    draft, target = draft_model_of(engine).runner, target_runner(engine)
    assert draft.caches is target.caches
    assert (draft.paged_model.flat is None) == (flat_model_of(engine) is None)
    ids = torch.arange(40)
    exact = torch.nn.functional.embedding(ids, model.model.embed_tokens.weight)
    assert torch.equal(exact, draft.paged_model.model.model.embed_tokens(ids))
    hidden = torch.randn(3, 64)
    packed, plain = draft.paged_model.model.lm_head(hidden), model.lm_head(hidden)
    assert 1e-4 < (packed - plain).norm() / plain.norm() < 0.02


@pytest.mark.parametrize("options", [{}, {"cape": True}, {"rejection_sample_method": "coupled"}])
def test_sampled_output_has_the_targets_distribution(options):
    model = small_model()
    assert p_value((model, None), FILTERED, spec_of(4, 2, **options)) > ALPHA


def test_a_seeds_text_does_not_depend_on_the_batch_or_preemption():
    model = random_model("llama", hidden_size=64)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=28) for seed in range(4)]
    roomy = Engine(model, spec=spec_of(4), config=EngineConfig(block_size=4))
    alone = [
        roomy.generate([prompt], one)[0].token_ids
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    engine = Engine(model, spec=spec_of(4), config=EngineConfig(block_size=4, num_blocks=24))
    preempted = count_preemptions(engine)
    together = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert together == alone
    assert preempted[0] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model = random_model("qwen3").to(dtype)
    engine = Engine(model, spec=spec_of(8), config=EngineConfig(dtype="auto"))
    engine.generate(PROMPTS, GREEDY)
    assert engine.stats.acceptance_rate > 0.3


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("mamba2", "method: 'quantized' needs a plain decoder, but Mamba2ForCausalLM is recurrent"),
        ("t5", "method: 'quantized' needs a plain decoder, but T5For.* is an encoder-decoder"),
    ],
)
def test_what_it_cannot_do_is_refused(kind, named):
    target = random_t5() if kind == "t5" else random_model(kind)
    with pytest.raises(ValueError, match=f"^{named}"):
        Engine(target, spec=spec_of())


def test_weights_that_are_not_finite_are_refused():
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    named = r"^draft_bits: cannot quantize LlamaForCausalLM: weight: expected finite values"
    with pytest.raises(ValueError, match=named):
        Engine(model, spec=spec_of())


def test_wrong_options():
    with pytest.raises(ValueError, match=r"^draft_bits: expected 4 or 8, got 5"):
        spec_of(5)
    with pytest.raises(ValueError, match=r"^draft_bits: expected 4 or 8, got True"):
        spec_of(True)
    with pytest.raises(ValueError, match=r"^draft_bits: not for method 'early_exit'"):
        SpecConfig("early_exit", exit_layer=1, draft_bits=8)
    with pytest.raises(ValueError, match=r"^drafter: method 'quantized' does not take one"):
        Engine(random_model(), random_model(), spec=spec_of())
    with pytest.raises(ValueError, match=r"^method: 'quantized' reads the target's weights"):
        Simulator("tiny", None, VOCAB_SIZE, spec=spec_of())
    with pytest.raises(ValueError, match=r"^draft_bits: has kernels for CPUs only"):
        Engine(random_model(), spec=spec_of(), config=EngineConfig(backend="triton"))


def test_it_says_if_most_weights_stay_as_they_are(caplog):
    with caplog.at_level(logging.WARNING, "fastspec"):
        Engine(random_model("llama"), spec=spec_of())
        assert not [record for record in caplog.records if "draft_bits:" in record.message]
        Engine(random_model("gpt2"), spec=spec_of())  # its layers are Conv1D
    assert "of the weights of GPT2LMHeadModel are in linear layers" in caplog.text
