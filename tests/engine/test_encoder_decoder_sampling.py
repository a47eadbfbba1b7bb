"""Sampled output of encoder-decoders has the target's exact distribution."""

import pytest

from fastspec import SpecConfig

from ..models import perturbed, random_t5
from .helpers import ALPHA, FILTERED, PLAIN, VOCAB_SIZE, p_value

PROMPT = [4, 2, 5, 1]


@pytest.fixture(scope="module")
def pair():
    model = random_t5(seed=4, vocab_size=VOCAB_SIZE)
    return model, perturbed(model, 0.35)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("draft_model", PLAIN),
        ("draft_model", FILTERED),
        ("greedy drafts", FILTERED),
        ("tree", FILTERED),
        ("mag", PLAIN),
    ],
)
def test_exact_distribution(pair, sampling, method):
    model, drafter = pair
    if method == "mag":
        drafter, spec = None, SpecConfig("mag", 2)
    elif method == "tree":
        spec = SpecConfig("tree", 2, tree_width=2, tree_nodes=4)
    else:
        how = "greedy" if method == "greedy drafts" else "probabilistic"
        spec = SpecConfig(num_speculative_tokens=2, draft_sample_method=how)
    assert p_value((model, drafter), sampling, spec, prompt=PROMPT) > ALPHA
