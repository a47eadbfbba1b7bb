"""After every step both caches equal a fresh prefill of the committed tokens."""

import pytest
import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import perturbed, random_model

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10]


def cached(runner, request, count):
    """Keys and values of the first `count` tokens of a request, one pair for each layer."""
    size = next(iter(runner.caches.values()))[0].shape[1]
    slots = torch.tensor([request.block_table[t // size] * size + t % size for t in range(count)])
    return [
        tuple(cache.flatten(0, 1)[slots] for cache in pair)
        for _, pair in sorted(runner.caches.items())
    ]


def fresh(model, token_ids):
    out = model(torch.tensor([token_ids]), use_cache=True)
    return [
        (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
        for layer in out.past_key_values.layers
    ]


def assert_same(actual, expected):
    for actual_pair, expected_pair in zip(actual, expected, strict=True):
        for left, right in zip(actual_pair, expected_pair, strict=True):
            torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.08])
@torch.no_grad()
def test_caches_equal_a_fresh_prefill(temperature, noise):
    model = random_model("llama")
    drafter = perturbed(model, noise)
    config = EngineConfig(block_size=4)
    engine = Engine(model, drafter, spec=SpecConfig(num_speculative_tokens=3), config=config)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(
            prompt,
            SamplingParams(temperature=temperature, seed=index, max_tokens=24, ignore_eos=True),
        )
    accepted_lens = set()
    while engine.has_unfinished:
        engine.step()
        for request in engine._scheduler.running:
            count = len(request.token_ids) - 1
            assert request.num_cached == count
            assert_same(
                cached(engine._runner, request, count), fresh(model, request.token_ids[:count])
            )
            draft_count = engine._speculation.drafter._num_cached[request.request_id]
            assert count - 1 <= draft_count <= count
            assert_same(
                cached(engine._speculation.drafter.runner, request, draft_count),
                fresh(drafter, request.token_ids[:draft_count]),
            )
            accepted_lens |= {i for i, n in enumerate(request.stats.acceptance_histogram) if n}
    assert accepted_lens >= ({3} if noise == 0 else {0, 1, 2, 3})


def test_blocks_come_back():
    engine = Engine(random_model("llama"), random_model("llama", seed=3))
    manager = engine._scheduler.block_manager
    engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    assert manager.num_free == manager.num_blocks
    assert engine._speculation.drafter._num_cached == {}
