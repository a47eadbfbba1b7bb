"""What a benchmark computes from counters: the speed-up it expects, and the SWI."""

import pytest

from fastspec.engine.stats import SpecStats
from fastspec.tools.bench import predicted_speed_up, step_costs, swi
from fastspec.tools.formulas import expected_tokens


def stats(num_steps, num_tokens, propose, verify, commit, prefill=0.0):
    seconds = {"prefill": prefill, "propose": propose, "verify": verify, "commit": commit}
    return SpecStats(num_steps=num_steps, num_output_tokens=num_tokens, seconds=seconds)


def test_prediction_is_the_formula_of_independent_acceptance():
    rate, num_draft, cost = 0.7, 4, 0.05
    tokens = expected_tokens(rate, num_draft)
    plain = stats(60, 60, 0.0, 45.0, 5.0)
    plain.add(stats(40, 40, 0.0, 45.0, 5.0))
    drafted = stats(1000, 1000 * tokens, 1000 * num_draft * cost, 1500.0, 50.0)
    expected = (1 - rate ** (num_draft + 1)) / ((1 - rate) * (num_draft * cost + 1))
    assert predicted_speed_up(plain, drafted) == pytest.approx(expected)
    assert step_costs(plain, drafted) == pytest.approx((num_draft * cost, 1.55))


def test_reading_prompts_is_no_part_of_what_drafts_speed_up():
    plain = stats(100, 100, 0.0, 90.0, 10.0, prefill=50.0)
    drafted = stats(50, 200, 40.0, 70.0, 0.0, prefill=110.0)  # twice as many tokens
    assert predicted_speed_up(plain, drafted) == pytest.approx(2 * 150 / (110 + 40 + 50))


def test_swi_of_runs():
    total = SpecStats()
    for passes in ({}, {"draft_model": 35}):
        total.add(SpecStats(num_steps=5, num_output_tokens=12, num_draft_passes=passes))
    assert swi(total, 8e6, 1e6) == pytest.approx(24 * 8 / (10 * 8 + 35))
    copied = SpecStats(num_steps=5, num_output_tokens=12)
    assert swi(copied, 8e6, 0) == 12 / 5


def test_counters_add_up():
    total, parts = SpecStats(), (SpecStats(), SpecStats())
    for part, steps in zip(parts, ([(4, 2, 3), (4, 4, 5)], [(4, 0, 1)]), strict=True):
        for step in steps:
            part.record_step(*step)
        total.add(part)
    assert total.acceptance_histogram == [1, 0, 1, 0, 1]
    assert total.num_accepted_tokens_per_pos == [2, 2, 1, 1]
    assert (total.acceptance_rate, total.mean_acceptance_length) == (6 / 12, 9 / 3)
    assert parts[0].acceptance_histogram == [0, 0, 1, 0, 1]
