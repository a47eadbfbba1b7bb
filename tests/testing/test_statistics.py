"""The chi-square test, and the check that proposals come from the claimed distribution."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare

from fastspec_kernels import logits_to_probs, sample
from fastspec_kernels.testing import assert_counts, assert_draft_contract, chi_square


def test_chi_square_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for cells in (2, 7, 300):
        distribution = rng.dirichlet(np.full(cells, 50.0))
        counts = rng.multinomial(100_000, distribution)
        expected = chisquare(counts, distribution * 100_000).pvalue
        assert chi_square(counts, distribution) == pytest.approx(expected, rel=1e-9)


def test_rare_cells_are_pooled():
    distribution = np.array([0.5, 0.499, *[1e-5] * 100])
    counts = np.array([5000, 4990, *[0] * 90, *[1] * 10])
    assert chi_square(counts, distribution) == pytest.approx(chi2.sf(0, 2))
    counts[-1] = 90
    assert chi_square(counts, distribution) < 1e-6


def test_impossible_cells():
    assert chi_square(np.array([10, 1]), np.array([1.0, 0.0])) == 0
    assert chi_square(np.array([10, 0]), np.array([1.0, 0.0])) == 1


def test_false_alarms_are_as_rare_as_stated():
    rng = np.random.default_rng(1)
    distribution = rng.dirichlet(np.full(16, 3.0))
    alarms = sum(
        chi_square(rng.multinomial(2000, distribution), distribution) < 0.05 for _ in range(2000)
    )
    assert 60 < alarms < 140


def test_message_names_the_worst_cells():
    with pytest.raises(AssertionError, match=r"dice: .*1200 draws; worst: face 2: seen 700, exp"):
        assert_counts(
            np.array([100, 100, 700, 100, 100, 100]),
            np.full(6, 1 / 6),
            "dice",
            name=lambda cell: f"face {cell}",
        )


NUM, VOCAB = 100_000, 12


def drawn(generator, temperature=1.0, **parameters):
    """Rows that differ, and a draw from each."""
    logits = torch.randn(NUM, VOCAB, generator=generator) * 1.5
    uniform = torch.rand(NUM, generator=generator)
    tensors = {name: torch.full((NUM,), value) for name, value in parameters.items()}
    tensors["temperature"] = torch.full((NUM,), temperature)
    tokens, _ = sample(logits, uniform, **tensors)
    return logits, tensors, tokens


def test_contract_holds_for_sample():
    generator = torch.Generator().manual_seed(0)
    for parameters in ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}):
        logits, tensors, tokens = drawn(generator, **parameters)
        assert_draft_contract(tokens, logits_to_probs(logits, **tensors))


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (lambda logits: logits.mul(0.9).softmax(-1), r"places|tokens"),
        (lambda logits: logits.roll(1, 0).softmax(-1), r"places|tokens"),
        (lambda logits: logits.roll(1, 1).softmax(-1), r"places|tokens"),
        (lambda logits: logits.round().softmax(-1), "claimed probabilities"),
        (lambda logits: logits.masked_fill(logits < -2, -torch.inf).softmax(-1), "probability 0"),
    ],
)
def test_contract_catches_claims_of_another_distribution(claim, message):
    logits, _, tokens = drawn(torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match=message):
        assert_draft_contract(tokens, claim(logits))


def test_contract_catches_a_number_used_twice():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(NUM, VOCAB, generator=generator)
    uniform = torch.rand(NUM // 2, generator=generator).repeat_interleave(2)
    tokens, _ = sample(logits, uniform)
    with pytest.raises(AssertionError, match="neighbours"):
        assert_draft_contract(tokens, logits.softmax(-1))


def test_contract_refuses_what_is_no_distribution():
    with pytest.raises(ValueError, match="token_ids: expected shape"):
        assert_draft_contract(np.zeros(3, dtype=int), np.ones((2, 1)))
    with pytest.raises(ValueError, match="draft_probs: rows must add up"):
        assert_draft_contract(np.zeros(2, dtype=int), np.ones((2, 5)))
    with pytest.raises(AssertionError, match="probability 0"):
        assert_draft_contract(np.array([0, 9]), np.ones((2, 1)))
