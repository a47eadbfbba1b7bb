"""Relaxed acceptance: lossy within its bound, off by default, refused where it has no meaning."""

import pytest
import torch

import fastspec
from fastspec import SamplingParams, SpecConfig
from fastspec.tools.simulate import Simulator

from ..models import random_model

PROMPT = [5, 6, 7, 8]
FACTOR = 2.0
RUNS = 1500


def first_tokens(target, draft, spec):
    engine = fastspec.Engine(target, draft, spec=spec)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=2) for seed in range(RUNS)]
    outputs = engine.generate([PROMPT] * RUNS, params)
    counts = torch.zeros(target.config.vocab_size)
    for output in outputs:
        counts[output.token_ids[0]] += 1
    return counts / RUNS, engine.stats.acceptance_rate


def test_no_token_is_more_likely_than_the_bound_allows():
    target, draft = (random_model("llama", seed=seed, vocab_size=32) for seed in (0, 1))
    with torch.no_grad():
        probs = target(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    exact, exact_rate = first_tokens(target, draft, SpecConfig("draft_model", 1))
    relaxed, rate = first_tokens(
        target, draft, SpecConfig("draft_model", 1, relaxed_acceptance=FACTOR)
    )
    noise = 5 * (FACTOR * probs / RUNS).sqrt() + 1 / RUNS
    assert (relaxed <= FACTOR * probs + noise).all()
    assert rate > exact_rate
    assert (relaxed - probs).abs().sum() > 2 * (exact - probs).abs().sum()


def test_greedy_output_is_exact():
    target, draft = (random_model("llama", seed=seed) for seed in (0, 1))
    params = SamplingParams(temperature=0, max_tokens=20)
    spec = SpecConfig("draft_model", relaxed_acceptance=50.0)
    (plain,) = fastspec.Engine(target).generate([PROMPT], params)
    (relaxed,) = fastspec.Engine(target, draft, spec=spec).generate([PROMPT], params)
    assert relaxed.token_ids == plain.token_ids


@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan"), "2", True, None])
def test_bad_values(value):
    with pytest.raises(ValueError, match="relaxed_acceptance: expected a finite number >= 1"):
        SpecConfig(relaxed_acceptance=value)


@pytest.mark.parametrize(
    "options", [{"method": "tree"}, {"cape": True}, {"rejection_sample_method": "block"}]
)
def test_only_chains_under_the_standard_rule_can_be_relaxed(options):
    with pytest.raises(ValueError, match="relaxed_acceptance: expected 1 for trees, and for block"):
        SpecConfig(**options, relaxed_acceptance=2.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("relaxed_acceptance", 2.0),
        ("synthetic_acceptance_rate", 0.5),
        ("rejection_sample_method", "block"),
    ],
)
def test_a_simulation_is_exact(name, value):
    target = random_model("llama")
    spec = SpecConfig("prompt_lookup", **{name: value})
    with pytest.raises(ValueError, match=f"{name}: expected .* the only one that is simulated"):
        Simulator(target, None, target.config.vocab_size, spec=spec)
