"""Time to the first token of a prompt whose beginning the cache holds, beside reading all of it."""

import pytest

import fastspec
from fastspec import EngineConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.models.loading import load_tokenizer

SHARED_TOKENS, OWN_TOKENS = 1000, 10


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_prefix_caching(compare, method):
    spec = fastspec.SpecConfig(method=method)
    with_cache, without = (
        fastspec.Engine("tiny", spec=spec, config=EngineConfig(device="cpu", prefix_caching=on))
        for on in (True, False)
    )
    text = load_tokenizer("target", "tiny")("\n".join(bundled_prompts(32)))["input_ids"]
    prefix = text[:SHARED_TOKENS]
    assert len(prefix) == SHARED_TOKENS
    own = (text[start : start + OWN_TOKENS] for start in range(len(text) - OWN_TOKENS))
    params = fastspec.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def ids(engine, tail):
        return engine.generate([prefix + tail], params)[0].token_ids

    for _ in range(3):
        tail = next(own)
        assert ids(with_cache, tail) == ids(without, tail)
    assert with_cache.stats.num_cached_prompt_tokens >= 2 * (SHARED_TOKENS - 16)

    def first_token(engine):
        stream = engine.stream(prefix + next(own), params)
        next(stream)
        stream.close()

    compare(
        {
            "op": "first_token",
            "shape": {"shared_tokens": SHARED_TOKENS, "own_tokens": OWN_TOKENS},
            "target": "tiny",
            "method": method,
            "dtype": "float32",
        },
        ours=lambda: first_token(with_cache),
        peer=lambda: first_token(without),
    )
