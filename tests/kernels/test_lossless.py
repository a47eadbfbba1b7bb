"""Exact proof on small vocabularies: the emitted sequence has the target's joint distribution.

Models are random tables with a fresh distribution for every prefix. Uniform numbers take the values
0/N .. (N-1)/N, N such that every step of every CDF falls on the grid: sums over the grid are exact
integrals.
"""

import itertools
from collections import Counter
from fractions import Fraction
from random import Random

import pytest

from . import chain_rules

UNIT = 4  # probabilities are multiples of 1/4
GRID = [Fraction(i, 12) for i in range(12)]


def random_distribution(random: Random, vocab: int) -> list[Fraction]:
    """UNIT grains thrown into `vocab` cells."""
    cells = Counter(random.randrange(vocab) for _ in range(UNIT))
    return [Fraction(cells[token], UNIT) for token in range(vocab)]


def random_model(random: Random, vocab: int, length: int) -> dict[tuple, list[Fraction]]:
    """A next-token distribution for every prefix of up to `length` tokens."""
    return {
        prefix: random_distribution(random, vocab)
        for size in range(length + 1)
        for prefix in itertools.product(range(vocab), repeat=size)
    }


def target_law(target, vocab, length) -> dict[tuple, Fraction]:
    """Joint probability of every sequence of `length` tokens."""
    law = {}
    for sequence in itertools.product(range(vocab), repeat=length):
        probability = Fraction(1)
        for i, token in enumerate(sequence):
            probability *= target[sequence[:i]][token]
        law[sequence] = probability
    return law


def emitted_law(rule, target, draft, vocab, num_draft, certain) -> Counter:
    """Law of num_draft + 1 tokens: what one step emits, continued by plain target sampling."""
    law: Counter = Counter()

    def complete(prefix, probability):
        if len(prefix) == num_draft + 1:
            law[prefix] += probability
            return
        for token, share in enumerate(target[prefix]):
            if share:
                complete((*prefix, token), probability * share)

    def propose(prefix, probability):
        if len(prefix) == num_draft:
            complete(prefix, probability)
            return
        for token, share in enumerate(draft[prefix]):
            if not share:
                continue
            row = [Fraction(x == token) for x in range(vocab)] if certain else draft[prefix]
            results = Counter(
                rule(target[prefix], row, token, *pair) for pair in itertools.product(GRID, GRID)
            )
            for (emitted, accepted), count in results.items():
                follow = propose if accepted else complete
                weight = probability * share * Fraction(count, len(GRID) ** 2)
                follow((*prefix, emitted), weight)

    propose((), Fraction(1))
    return law


def is_lossless(rule, vocab, num_draft, certain, seed=0) -> bool:
    random = Random(seed)
    target = random_model(random, vocab, num_draft)
    draft = random_model(random, vocab, num_draft)
    emitted = emitted_law(rule, target, draft, vocab, num_draft, certain)
    wanted = target_law(target, vocab, num_draft + 1)
    assert sum(emitted.values()) == 1
    return all(emitted[sequence] == wanted[sequence] for sequence in wanted)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("vocab", "num_draft"), [(2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_standard_rule_is_exact(vocab, num_draft, certain):
    for seed in range(1 if vocab == 4 else 3):
        assert is_lossless(chain_rules.standard, vocab, num_draft, certain, seed)


@pytest.mark.parametrize(
    ("rule", "certain"),
    [
        (chain_rules.without_subtraction, False),
        (chain_rules.without_subtraction, True),
        (chain_rules.models_swapped, False),
        (chain_rules.shared_uniform, False),
        (chain_rules.shared_uniform, True),
        (chain_rules.not_strict, False),
        (chain_rules.not_strict, True),
        (chain_rules.drawn_again, True),
        (chain_rules.always_accepted, False),
        (chain_rules.always_accepted, True),
    ],
)
def test_broken_rules_are_caught(rule, certain):
    assert not all(is_lossless(rule, 4, 2, certain, seed) for seed in range(3))


def test_not_strict_emits_a_token_of_probability_zero():
    target, draft = [Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]
    zero = Fraction(0)
    assert chain_rules.not_strict(target, draft, 1, zero, zero) == (1, True)
    assert chain_rules.standard(target, draft, 1, zero, zero) == (0, False)
