"""Synthetic acceptance: the rate is the one asked for, and nothing forbidden is written."""

import pytest
import torch

from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.engine.acceptance import verify_synthetic
from fastspec_kernels import verify_chain

from ..models import random_model

PROMPT = [5, 6, 7, 8]
NO_FILTERS = {"top_k": None, "top_p": None, "min_p": None}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_rate_is_the_one_asked_for(temperature):
    target, draft = (random_model("llama", seed=seed, vocab_size=64) for seed in (0, 1))
    spec = SpecConfig("draft_model", 4, synthetic_acceptance_rate=0.7)
    engine = Engine(target, draft, spec=spec)
    params = [SamplingParams(temperature=temperature, seed=n, max_tokens=60) for n in range(40)]
    outputs = engine.generate([PROMPT] * 40, params)
    stats = engine.stats
    expected = sum(0.7**place for place in range(5))  # tokens of a step
    assert stats.mean_acceptance_length == pytest.approx(expected, abs=0.1)
    assert {len(output.token_ids) for output in outputs} == {60}


@pytest.mark.parametrize("spec", [{}, {"schedule": "heuristic"}])
def test_a_rate_of_0_is_plain_decoding(spec):
    target, draft = (random_model("llama", seed=seed) for seed in (0, 1))
    params = SamplingParams(temperature=0, max_tokens=12)
    config = SpecConfig("draft_model", synthetic_acceptance_rate=0.0, **spec)
    (output,) = Engine(target, draft, spec=config).generate([PROMPT], params)
    assert output.token_ids == Engine(target).generate([PROMPT], params)[0].token_ids
    assert output.stats.num_accepted_tokens == 0


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_a_grammar_holds(method):
    target = random_model("llama")
    draft = random_model("llama", seed=1) if method == "draft_model" else None
    spec = SpecConfig(method, 4, synthetic_acceptance_rate=1.0)
    allowed = [3, 9, 11]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=20, allowed_token_ids=allowed)
    (output,) = Engine(target, draft, spec=spec).generate([PROMPT * 3], params)
    assert {*output.token_ids} <= {*allowed}


def test_results_are_shaped_as_those_of_verify_chain():
    """At rates 0 and 1 of drafts that it rejects and accepts; ragged, -1 in the middle, NaN."""
    torch.manual_seed(0)
    logits = torch.randn(10, 40)
    logits[8] = torch.nan
    cu_rows = torch.tensor([0, 4, 6, 9, 10], dtype=torch.int32)
    best = logits.nan_to_num().argmax(1).int()
    drafts = torch.stack([best[0:3], best[4:7], best[6:9], best[9:10].expand(3)])
    drafts[0, 2] = -1
    uniforms = torch.rand(4, 4)
    temperature = torch.zeros(4)
    for rate, given in ((1.0, drafts), (0.0, (drafts + 1) % 40)):
        sampling = {"temperature": temperature, **NO_FILTERS}
        arguments = logits, cu_rows, given, uniforms
        ours = verify_synthetic(*arguments, rate, sampling, None, "reference")
        expected = verify_chain(*arguments, temperature=temperature, backend="reference")
        is_valid = expected[1] >= 0
        assert torch.equal(ours[1], expected[1])
        assert torch.equal(ours[0][is_valid], expected[0][is_valid])
        torch.testing.assert_close(ours[2][is_valid], expected[2][is_valid])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "tree"},
        {"cape": True},
        {"rejection_sample_method": "block"},
        {"relaxed_acceptance": 2.0},
    ],
)
def test_only_chains_under_the_standard_rule(options):
    with pytest.raises(ValueError, match="synthetic_acceptance_rate: expected None for trees"):
        SpecConfig(**options, synthetic_acceptance_rate=0.5)
