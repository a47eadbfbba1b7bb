"""Formulas of speculation against Monte-Carlo runs of what they describe, and published tables."""

import numpy as np
import pytest

from fastspec.tools import cost_counters, formulas

ROUNDS = 200_000
RATES = (0.0, 0.3, 0.8, 1.0)


def accepted(generator, rate, count, rounds=ROUNDS):
    """Of `count` drafts accepted one by one at a rate, how many come before the first rejection."""
    hits = generator.random((rounds, count)) < rate
    return np.cumprod(hits, axis=1).sum(axis=1)


def assert_mean(samples, expected):
    """Within five standard errors; exact where nothing varies."""
    error = samples.std() / len(samples) ** 0.5
    assert abs(samples.mean() - expected) <= 5 * error + 1e-9


@pytest.fixture
def generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num", [0, 1, 5])
def test_plain(generator, rate, num):
    tokens = accepted(generator, rate, num) + 1
    assert_mean(tokens, formulas.expected_tokens(rate, num))
    by_position = formulas.expected_tokens_by_position([rate] * num)
    assert by_position == pytest.approx(formulas.expected_tokens(rate, num))
    assert_mean(tokens / (1 + num * 0.1), formulas.speed_up(rate, num, 0.1))


def test_rates_that_differ_by_position(generator):
    rates = [0.9, 0.5, 0.7]
    hits = generator.random((ROUNDS, 3)) < rates
    tokens = np.cumprod(hits, axis=1).sum(axis=1) + 1
    assert_mean(tokens, formulas.expected_tokens_by_position(rates))


def test_measured_rates(generator):
    rates = [0.9, 0.5, 0.7]
    hits = np.cumprod(generator.random((50_000, 3)) < rates, axis=1).sum(axis=1)
    wanted = generator.integers(0, 4, len(hits))
    steps = [formulas.Step(w, w, min(w, h)) for w, h in zip(wanted, hits, strict=True)]
    assert formulas.acceptance_by_position(steps) == pytest.approx(rates, abs=0.02)
    assert formulas.acceptance_by_position([]) == []
    unproposed = [formulas.Step(3, 1, 1), formulas.Step(3, 3, 3)]
    assert formulas.acceptance_by_position(unproposed) == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("a", RATES)
@pytest.mark.parametrize("b", RATES)
@pytest.mark.parametrize(("num_reviews", "num_drafts"), [(1, 0), (3, 4), (2, 10)])
def test_vertical(generator, a, b, num_reviews, num_drafts):
    reviewed = sum(accepted(generator, b, num_drafts) + 1 for _ in range(num_reviews))
    longest = num_reviews * (num_drafts + 1)
    tokens = np.minimum(accepted(generator, a, longest), reviewed) + 1
    time = 1 + num_reviews * 0.2 + num_reviews * num_drafts * 0.01
    expected = formulas.vertical_speed_up((a, b), (0.2, 0.01), num_reviews, num_drafts)
    assert_mean(tokens / time, expected)


@pytest.mark.parametrize("first", RATES)
@pytest.mark.parametrize("second", RATES)
@pytest.mark.parametrize("lengths", [(0, 0), (0, 4), (3, 0), (3, 5)])
def test_horizontal(generator, first, second, lengths):
    kept = accepted(generator, first, lengths[0])
    later = accepted(generator, second, lengths[1])
    tokens = kept + np.where(kept == lengths[0], later, 0) + 1
    time = 1 + lengths[0] * 0.2 + lengths[1] * 0.01
    expected = formulas.horizontal_speed_up((first, second), (0.2, 0.01), lengths)
    assert_mean(tokens / time, expected)


def test_a_cascade_of_one_kind_is_plain():
    plain = formulas.speed_up(0.7, 6, 0.1)
    assert formulas.horizontal_speed_up((0.7, 0.7), (0.1, 0.1), (2, 4)) == pytest.approx(plain)
    alone = formulas.vertical_speed_up((0.7, 0.0), (0.1, 0.0), 6, 0)
    assert alone == pytest.approx(plain)


def test_the_best_length():
    best = formulas.best_num_speculative_tokens(0.8, 0.05, 12)
    speeds = [formulas.speed_up(0.8, num, 0.05) for num in range(13)]
    assert speeds[best] == max(speeds)
    assert formulas.best_num_speculative_tokens(0.05, 0.1, 12) == 0
    assert formulas.best_num_speculative_tokens(1.0, 0.1, 12) == 12
    # Corollary 3.9 of Leviathan et al.: one draft token already gains (1 + a) / (1 + c).
    assert formulas.speed_up(0.5, 1, 0.1) == pytest.approx(1.5 / 1.1)


def test_throughput():
    assert formulas.throughput(2.5, 0.02, 0.03) == pytest.approx(50.0)
    plain = formulas.throughput(1.0, 0.0, 0.03)
    ratio = formulas.throughput(formulas.expected_tokens(0.6, 4), 4 * 0.003, 0.03) / plain
    assert ratio == pytest.approx(formulas.speed_up(0.6, 4, 0.1))


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        ("google/flan-t5-xxl", 11300),
        ("google/flan-t5-xl", 3000),
        ("t5-base", 220),
        ("JackFram/llama-160m", 160),
        ("llama_7b", 7000),
        ("llama", 7000),
        ("LLaMA-chat", 7000),
        ("meta-llama/Llama-2-7b-hf", 7000),
        ("deepseek-llm-7b-base", 7000),
        ("Qwen2.5-7B", 7000),
        ("mag", 0),
    ],
)
def test_published_costs(model, millions):
    assert cost_counters.pass_cost(model) == millions


def test_swi_equals_its_formula():
    passes = {"flan-t5-xxl": 30, "flan-t5-base": 70, "flan-t5-small": 90, "mag": 500}
    swi = cost_counters.standardized_walltime_improvement
    by_size = 100 * 11300 / (30 * 11300 + 70 * 220 + 90 * 60)
    assert swi(100, "flan-t5-xxl", passes) == pytest.approx(by_size)
    by_time = 100 / (30 + 70 * 0.04 + 90 * 0.02)
    assert swi(100, "flan-t5-xxl", passes, "previous_work") == pytest.approx(by_time)
    assert swi(100, "t5-xxl", {"t5-xxl": 100}) == 1.0
    own = {"big": 8, "small": 1}
    assert swi(9, "big", {"big": 3, "small": 12, "mag": 7}, own) == pytest.approx(9 * 8 / 36)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: formulas.expected_tokens(1.5, 2), "acceptance_rate"),
        (lambda: formulas.expected_tokens(float("nan"), 2), "acceptance_rate"),
        (lambda: formulas.expected_tokens(0.5, -1), "num_speculative_tokens"),
        (lambda: formulas.expected_tokens(0.5, 2.0), "num_speculative_tokens"),
        (lambda: formulas.speed_up(0.5, 2, -0.1), "cost_ratio"),
        (lambda: formulas.throughput(2.0, 0.1, 0.0), "verify_seconds"),
        (lambda: formulas.vertical_speed_up((0.5, 2.0), (0.1, 0.1), 1, 1), "rates"),
        (lambda: formulas.vertical_speed_up((0.5, 0.5), (0.1, 0.1), 0, 1), "num_reviews"),
        (lambda: formulas.horizontal_speed_up((0.5, 0.5), (0.1, -1), (1, 1)), "costs"),
        (lambda: formulas.horizontal_speed_up((0.5, 0.5), (0.1, 0.1), (1, -1)), "lengths"),
        (lambda: cost_counters.pass_cost("llama-27b"), "llama-27b"),
        (lambda: cost_counters.pass_cost("Llama-3.2-1B"), "1B"),
        (lambda: cost_counters.pass_cost("llama-2-13b-hf"), "13b"),
        *(
            (lambda model=model: cost_counters.pass_cost(model), f"no cost for '{model}'")
            for model in ("deepseek-llm-67b-base", "Llama-2-13b-base", "opt-13b-large")
        ),
        (lambda: cost_counters.pass_cost("SmolLM2-1.7B"), "1.7B"),
        (lambda: cost_counters.pass_cost("llama-7b", "previous_work"), "previous_work"),
        (lambda: cost_counters.pass_cost("llama-7b", "guess"), "counter_version"),
        (lambda: cost_counters.pass_cost("b", {"a": 1.0}), "model"),
        (lambda: cost_counters.total_cost({"t5-small": -1}), "t5-small"),
    ],
)
def test_bad_input(call, named):
    with pytest.raises(ValueError, match=named):
        call()
