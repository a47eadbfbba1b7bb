"""The exact distribution of functions of uniform numbers."""

from fractions import Fraction

import pytest

from fastspec_kernels.testing import outcome_distribution

THIRD = Fraction(1, 3)


@pytest.mark.parametrize(
    ("function", "distribution"),
    [
        (lambda u: u[0] < THIRD, {True: THIRD, False: 1 - THIRD}),
        (lambda u: u[0] >= THIRD, {True: 1 - THIRD, False: THIRD}),
        (lambda u: 1 - 2 * u[0] > THIRD, {True: THIRD, False: 1 - THIRD}),
        (lambda u: (u[0] + 1) / 2 - THIRD <= THIRD, {True: THIRD, False: 1 - THIRD}),
        (lambda u: u[0] * 0 < 0, {False: 1}),
        (lambda u: u[0] * 0 <= 0, {True: 1}),
        (lambda u: u[0] < 0, {False: 1}),
        (lambda u: u[0] >= 1, {False: 1}),
        (lambda u: u[0] < 2 * u[0], {True: 1, False: 0}),
        (lambda u: (u[0] < THIRD, u[1] < THIRD), None),
        (lambda u: (u[0] < THIRD, u[0] < 2 * THIRD), None),
    ],
)
def test_distribution(function, distribution):
    found = outcome_distribution(function, 2)
    assert sum(found.values()) == 1
    if distribution is not None:
        assert found == distribution


def test_independent_numbers_and_one_number_used_twice():
    two = outcome_distribution(lambda u: (u[0] < THIRD, u[1] < THIRD), 2)
    assert two[True, True] == Fraction(1, 9)
    one = outcome_distribution(lambda u: (u[0] < THIRD, u[0] < THIRD), 1)
    assert one == {(True, True): THIRD, (False, False): 1 - THIRD}


def test_single_points_have_probability_zero_but_are_found():
    assert outcome_distribution(lambda u: u[0] <= 0, 1) == {True: 0, False: 1}
    assert outcome_distribution(lambda u: u[0] < 0, 1) == {False: 1}
    assert outcome_distribution(lambda u: THIRD <= u[0] <= THIRD, 1) == {True: 0, False: 1}


def test_floats_are_taken_too():
    distribution = outcome_distribution(lambda u: u[0] * 0.5 < 0.125, 1)
    assert distribution == {True: 0.25, False: 0.75}


def test_two_numbers_cannot_be_compared():
    with pytest.raises(TypeError, match="two different"):
        outcome_distribution(lambda u: u[0] < u[1], 2)


def test_a_number_is_not_a_truth_value():
    with pytest.raises(TypeError, match="truth value"):
        outcome_distribution(lambda u: bool(u[0]), 1)
