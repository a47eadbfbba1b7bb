"""Caches of 8 bits: with any drafter the engine decodes the target with rounded keys and values."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models import paged_model

from ..models import random_model
from .glide_models import often_right
from .helpers import hugging_face_greedy
from .probes import blocks, cached, running, target_runner

FLOAT8 = torch.float8_e4m3fn
PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SPECS = {
    "none": SpecConfig("none"),
    "draft_model": SpecConfig(num_speculative_tokens=3),
    "tree": SpecConfig("tree", num_speculative_tokens=3, tree_width=2, tree_nodes=8),
    "glide": SpecConfig("glide", num_speculative_tokens=3),
    "prompt_lookup": SpecConfig("prompt_lookup", prompt_lookup_min=1),
}


def rounded_attention(module, query, key, value, attention_mask, **kwargs):
    """Torch's own attention over keys and values rounded to 8 bits."""
    key, value = (states.to(FLOAT8).to(states.dtype) for states in (key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("rounded", rounded_attention)
AttentionMaskInterface.register("rounded", sdpa_mask)


@pytest.fixture(scope="module")
def rounded(model):
    """The target that is decoded, made without a line of ours."""
    other = deepcopy(model)
    other.set_attn_implementation("rounded")
    return other


def engine_of(model, drafter, method="draft_model", **options):
    config = EngineConfig(
        block_size=4, kv_cache_dtype="float8", backend="reference", prefill_chunk_size=7, **options
    )
    return Engine(model, drafter, spec=SPECS[method], config=config)


def drafter_of(method, model, drafter):
    if method == "glide":
        return often_right(model)
    return None if method in ("none", "prompt_lookup") else drafter


@pytest.mark.parametrize("method", SPECS)
def test_greedy_output_is_that_of_the_rounded_target(model, drafter, rounded, method):
    expected = [hugging_face_greedy(rounded, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = engine_of(model, drafter_of(method, model, drafter), method)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert method == "none" or engine.stats.num_accepted_tokens > 0


def test_rounding_shows(model, rounded):
    """Else the tests here would not tell the two targets apart."""
    exact, other = (
        [hugging_face_greedy(which, prompt, NUM_TOKENS) for prompt in PROMPTS]
        for which in (model, rounded)
    )
    assert exact != other


@torch.no_grad()
def test_caches_after_each_round(model, drafter, rounded):
    """Keys and values of every token that was read are those of a fresh pass, in 8 bits."""
    engine = engine_of(model, drafter)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    compared = []
    while engine.has_unfinished:
        engine.step()
        for request in (each for each in running(engine) if each.num_cached):
            token_ids = request.token_ids[: request.num_cached]
            layers = rounded(torch.tensor([token_ids]), use_cache=True).past_key_values.layers
            pages = cached(target_runner(engine), request, len(token_ids))
            for layer, pair in zip(layers, pages, strict=True):
                for page, states in zip(pair, (layer.keys, layer.values), strict=True):
                    wanted = states[0].transpose(0, 1)
                    assert page.dtype == FLOAT8
                    stored = wanted.to(FLOAT8).view(torch.uint8)
                    compared.append((page.view(torch.uint8) == stored).flatten())
                    torch.testing.assert_close(page.float(), wanted, atol=2e-3, rtol=0.07)
    assert torch.cat(compared).float().mean() > 0.999  # two passes may round a value differently


def test_the_cache_holds_four_times_as_many_tokens(model):
    sizes = [
        Engine(model, config=EngineConfig(kv_cache_memory=2**18, prefix_caching=True, **options))
        for options in ({}, {"kv_cache_dtype": "float8", "backend": "reference"})
    ]
    plain, float8 = (blocks(engine).num_blocks for engine in sizes)
    assert float8 // 4 == plain


@pytest.mark.parametrize("method", ["draft_model", "glide"])
def test_prefix_caching(model, drafter, method):
    """A second request that begins alike finds the blocks, and says the same."""
    drafter = drafter_of(method, model, drafter)
    prompts = [PROMPTS[1] + tail for tail in ([1, 2], [9])]
    expected = engine_of(model, drafter, method).generate(prompts, GREEDY)
    engine = engine_of(model, drafter, method, prefix_caching=True)
    outputs = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.stats.num_cached_prompt_tokens for o in outputs] == [0, 16]


def test_preemption(model, drafter):
    """Too few blocks for all: who waits is read anew, and says the same."""
    expected = engine_of(model, drafter).generate(PROMPTS, GREEDY)
    outputs = engine_of(model, drafter, num_blocks=22).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_sampled_output_depends_on_the_seed_only(model, drafter):
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
        for seed in range(3)
    ]
    engine = engine_of(model, drafter)
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate([p], q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes it")
def test_the_cpu_kernels_take_no_float8(model, backend, monkeypatch):
    monkeypatch.delenv("FASTSPEC_BACKEND", raising=False)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: the compiled kernels of cpu"):
        Engine(model, config=EngineConfig(kv_cache_dtype="float8", backend=backend))


@pytest.mark.parametrize(
    ("backend", "has_triton", "is_taken"),
    [("auto", True, True), ("auto", False, False), ("cuda", True, False), ("triton", True, True)],
)
def test_a_gpu_needs_triton(monkeypatch, backend, has_triton, is_taken):
    """The reference is never taken without being asked for."""
    monkeypatch.delenv("FASTSPEC_BACKEND", raising=False)
    names = ("cuda", "triton", "reference") if has_triton else ("cuda", "reference")
    monkeypatch.setattr(paged_model, "available_backends", lambda: names)
    refused = pytest.raises(ValueError, match="compiled kernels of cuda do not support float8")
    with nullcontext() if is_taken else refused:
        paged_model._check_float8(torch.device("cuda"), backend)


def test_other_architectures():
    """Windows, soft caps and sinks over such a cache: with a drafter as without one."""
    for name in ("gemma2", "gpt_oss"):
        target, draft = random_model(name), random_model("llama", seed=7)
        plain, fast = (
            engine_of(target, d, m).generate(PROMPTS, GREEDY)
            for d, m in ((None, "none"), (draft, "draft_model"))
        )
        assert [o.token_ids for o in plain] == [o.token_ids for o in fast]
