"""Sampling through token trees: exactly the target's distribution; broken engines are caught."""

import pytest

from fastspec import SpecConfig
from fastspec.drafters import TreeDrafter
from fastspec_kernels.testing import chi_square

from .helpers import ALPHA, FILTERED, drawn_counts, exact_distribution, small_pair
from .probes import flatten_draft_logits, share_numbers

SAMPLED_PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]


@pytest.fixture(scope="module")
def small_models():
    return small_pair()


def counts_of(models, **options):
    """Counts of the first tokens of texts so long that the trees are whole."""
    spec = SpecConfig(num_speculative_tokens=3, **options)
    return drawn_counts(models, FILTERED, spec, num_more=1)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"method": "tree", "tree_nodes": 9}, "without_replacement"),
        ({"method": "tree", "tree_paths": SAMPLED_PATHS}, "without_replacement"),
        ({"method": "tree", "tree_nodes": 9, "draft_sample_method": "greedy"}, "target_only"),
        ({"cape": True}, "without_replacement"),
        ({"cape": True, "draft_sample_method": "greedy"}, "target_only"),
    ],
    ids=["drawn", "paths", "likeliest", "cape", "cape of likeliest"],
)
def test_exact_distribution(small_models, options, rule, monkeypatch):
    rules = set()
    propose = TreeDrafter.propose

    def spied(self, batch):
        proposal = propose(self, batch)
        rules.add(proposal.sibling_rule)
        return proposal

    monkeypatch.setattr(TreeDrafter, "propose", spied)
    distribution = exact_distribution(small_models[0], FILTERED)
    assert chi_square(counts_of(small_models, **options), distribution) > ALPHA
    assert rules == {rule}


@pytest.mark.parametrize("break_engine", [share_numbers, flatten_draft_logits])
def test_biased_engines_are_caught(small_models, monkeypatch, break_engine):
    break_engine(monkeypatch)
    distribution = exact_distribution(small_models[0], FILTERED)
    counts = counts_of(small_models, method="tree", tree_paths=SAMPLED_PATHS)
    assert chi_square(counts, distribution) < ALPHA
