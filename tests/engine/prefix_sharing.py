"""What the tests of prefix caching have in common."""

from functools import lru_cache

import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig

from ..models import byte_tokenizer
from .probes import blocks, filled_blocks, findable_blocks, runners_of

SIZE = 4
TEXT = [7, 99, 41, 3, 250, 16, 77, 30, 64, 8, 120, 55, 91]
TAILS = [[1, 2, 3], [5, 6]]


def engine_of(model, drafter=None, prefix_caching=True, **config):
    return Engine(
        model,
        drafter,
        tokenizer=byte_tokenizer(),
        spec=SpecConfig(num_speculative_tokens=3),
        config=EngineConfig(block_size=SIZE, prefix_caching=prefix_caching, **config),
    )


def params_of(temperature=1.0, seed=0, max_tokens=10, **kwargs):
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, **kwargs
    )


@lru_cache(maxsize=2)
def _unshared(model, drafter):
    return engine_of(model, drafter, prefix_caching=False)


def alone(model, drafter, prompt, params):
    """What a request says by itself in an engine without sharing."""
    return _unshared(model, drafter).generate([prompt], params)[0]


class Watcher:
    """Compares, after each step, full blocks with what they held when they became so."""

    def __init__(self, engine):
        self.engine = engine
        self.num_compared = 0
        self.seen = {}

    def look(self):
        of_both = findable_blocks(self.engine), filled_blocks(self.engine)
        for runner, block_ids in zip(runners_of(self.engine), of_both, strict=True):
            for block_id in block_ids:
                now = torch.stack(
                    [cache[block_id] for pair in runner.caches.values() for cache in pair]
                )
                key = (id(runner), block_id, blocks(self.engine).tenancy(block_id))
                assert torch.equal(self.seen.setdefault(key, now), now)
                self.num_compared += 1
