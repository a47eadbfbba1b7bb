"""The bigram table: counts, ties, what was never seen, and the bundled one."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from fastspec.drafters.bigram_table import load_bigram
from fastspec.models.named import BUNDLED
from fastspec.train import bigram
from fastspec.train.bigram import count_bigrams


@pytest.mark.parametrize("waiting", [1, 40, 10_000])
def test_counts(waiting, monkeypatch):
    monkeypatch.setattr(bigram, "_MOST_WAITING", waiting)
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 9, size) for size in (0, 1, 2, 50, 300, 7)]
    pairs = Counter(pair for ids in documents for pair in pairwise(ids.tolist()))
    seconds = Counter(second for (_, second), count in pairs.items() for _ in range(count))
    commonest = min(seconds, key=lambda token: (-seconds[token], token))
    expected = [
        min(range(12), key=lambda second: (-pairs[first, second], second))
        if any(pairs[first, second] for second in range(12))
        else commonest
        for first in range(12)
    ]
    assert count_bigrams(iter(documents), 12) == expected


def test_nothing_to_count():
    with pytest.raises(ValueError, match=r"^documents: expected at least one with two"):
        count_bigrams([np.array([3]), np.array([], dtype=np.uint16)], 5)
    with pytest.raises(ValueError, match=r"^documents: token ids outside"):
        count_bigrams([np.array([3, 5])], 5)


def test_the_bundled_table():
    table = load_bigram(BUNDLED["tiny"] / "bigram.json", 4096)
    assert len(table) == 4096
    assert len(table.unique()) > 500
