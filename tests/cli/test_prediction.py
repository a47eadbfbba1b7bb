"""The speed-up that a benchmark expects from acceptance and the cost of drafts."""

import pytest

from fastspec.bench.end_to_end import predicted_speed_up
from fastspec.economics import expected_tokens
from fastspec.stats import SpecStats


def stats(num_steps, num_tokens, propose, verify, commit):
    seconds = {"prefill": 9.0, "propose": propose, "verify": verify, "commit": commit}
    return SpecStats(num_steps=num_steps, num_output_tokens=num_tokens, seconds=seconds)


def test_prediction_is_the_formula_of_independent_acceptance():
    rate, num_draft, cost = 0.7, 4, 0.05
    tokens = expected_tokens(rate, num_draft)
    plain = [stats(60, 60, 0.0, 45.0, 5.0), stats(40, 40, 0.0, 45.0, 5.0)]
    drafted = [stats(1000, 1000 * tokens, 1000 * num_draft * cost, 1500.0, 50.0)]
    expected = (1 - rate ** (num_draft + 1)) / ((1 - rate) * (num_draft * cost + 1))
    assert predicted_speed_up(plain, drafted) == pytest.approx(expected)
