"""After every step both caches equal a fresh prefill of the committed tokens."""

import pytest

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import perturbed, random_model
from .probes import (
    assert_blocks_came_back,
    assert_caches,
    draft_model_of,
    remembers_nobody,
    running,
)

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 10]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.08])
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
        assert_caches(engine, model, drafter)
        for request in running(engine):
            accepted_lens |= {i for i, n in enumerate(request.stats.acceptance_histogram) if n}
    assert accepted_lens >= ({3} if noise == 0 else {0, 1, 2, 3})


def test_blocks_come_back():
    engine = Engine(random_model("llama"), random_model("llama", seed=3))
    engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    assert_blocks_came_back(engine)
    assert remembers_nobody(draft_model_of(engine))
