"""Exact proofs that the rules are lossless, and that the broken ones are not."""

from fractions import Fraction
from functools import partial

import pytest

from fastspec_kernels.testing import (
    assert_exact_chain,
    assert_exact_tree,
    chain_distribution,
    random_model,
    rules,
    tree_distribution,
)
from fastspec_kernels.testing.enumeration import TREE_SHAPES

from . import broken_rules

SIBLING_RULES = ("target_only", "without_replacement", "with_replacement")


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("rule", [rules.standard, rules.block, broken_rules.block_of()])
def test_chain_rules_are_exact(rule, point_mass):
    assert_exact_chain(rule, point_mass=point_mass, num_models=8)


@pytest.mark.parametrize("sibling_rule", SIBLING_RULES)
def test_tree_rules_are_exact(sibling_rule):
    rule = getattr(rules, sibling_rule)
    assert_exact_tree(rule, sibling_rule, num_models=4)
    assert_exact_tree(rule, sibling_rule, vocab=4, num_models=2)


@pytest.mark.parametrize("siblings", SIBLING_RULES)
def test_target_only_is_exact_for_any_siblings(siblings):
    assert_exact_tree(rules.target_only, siblings)


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("lenience", [Fraction(5, 4), 2, 10])
def test_lenience_keeps_its_bound_and_is_lossy(lenience, point_mass):
    rule = partial(rules.standard, lenience=lenience)
    assert_exact_chain(rule, point_mass=point_mass, lenience=lenience)
    with pytest.raises(AssertionError, match="has probability"):
        assert_exact_chain(rule, point_mass=point_mass)
    with pytest.raises(AssertionError, match="more than"):
        assert_exact_chain(rule, point_mass=point_mass, lenience=Fraction(9, 8))


@pytest.mark.parametrize("point_mass", [False, True])
def test_block_verification_accepts_at_least_as_much(point_mass):
    gained = 0
    for seed in range(10):
        target, draft = (random_model(2 * seed + i, 3, 3) for i in (0, 1))
        plain, block = (
            sum(
                len(tokens) * share
                for tokens, share in chain_distribution(rule, target, draft, 3, point_mass).items()
            )
            for rule in (rules.standard, rules.block)
        )
        assert block >= plain
        gained += block > plain
    assert point_mass or gained > 0  # for certain proposals the two are the same


@pytest.mark.parametrize("parents", TREE_SHAPES)
def test_acceptance_of_fixed_siblings_is_their_target_probability(parents):
    """No rule can accept more often at one node; repeated tokens count once."""
    target = draft = random_model(5, 3, 4, minimum=1)
    fixed = (0, 1, 1, 2, 0)[: len(parents)]
    joint = tree_distribution(rules.target_only, target, draft, parents, fixed)
    rejected = sum(share for (nodes, _), share in joint.items() if not nodes)
    of_root = {token for token, parent in zip(fixed, parents, strict=True) if parent == 0}
    assert rejected == 1 - sum(target.row(())[token] for token in of_root)


@pytest.mark.parametrize(
    ("rule", "point_mass"),
    [
        (broken_rules.without_subtraction, False),
        (broken_rules.without_subtraction, True),
        (broken_rules.models_swapped, False),
        (broken_rules.shared_uniform, False),
        (broken_rules.shared_uniform, True),
        (broken_rules.not_strict, False),
        (broken_rules.not_strict, True),
        (broken_rules.drawn_again, True),
        (broken_rules.always_accepted, False),
        (broken_rules.always_accepted, True),
        (broken_rules.one_number_for_all, False),
        (broken_rules.one_number_for_all, True),
        (broken_rules.bonus_of_the_last_row, False),
        (broken_rules.bonus_of_the_last_row, True),
        (broken_rules.block_of(stops_early=True), False),
        (broken_rules.block_of(plain_residual=True), False),
        (broken_rules.block_of(inclusive=True), False),
    ],
)
def test_broken_chain_rules_are_caught(rule, point_mass):
    with pytest.raises(AssertionError, match=r"probability|never"):
        assert_exact_chain(rule, point_mass=point_mass)


@pytest.mark.parametrize(
    ("rule", "siblings"),
    [
        (rules.without_replacement, "with_replacement"),
        (rules.with_replacement, "without_replacement"),
        (rules.without_replacement, "target_only"),
        (broken_rules.every_sibling_alike, "without_replacement"),
        (broken_rules.every_sibling_alike, "with_replacement"),
        (broken_rules.every_sibling_alike, "target_only"),
        (broken_rules.repeated_siblings_count_again, "target_only"),
        (broken_rules.coin_zero_accepts, "target_only"),
        (broken_rules.siblings_not_zeroed, "target_only"),
        (broken_rules.draft_not_taken_away, "without_replacement"),
        (broken_rules.one_coin_for_all_siblings, "without_replacement"),
    ],
)
def test_broken_tree_rules_are_caught(rule, siblings):
    with pytest.raises(AssertionError, match=r"probability|never"):
        assert_exact_tree(rule, siblings)


def test_unknown_way_to_choose_siblings():
    with pytest.raises(ValueError, match="siblings"):
        assert_exact_tree(rules.target_only, "beam")
