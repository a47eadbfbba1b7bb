"""Counts which token follows which, for the bigram table of MaG."""

from collections.abc import Iterable

import numpy as np

_MOST_WAITING = 1 << 22  # pairs counted at a time


def count_bigrams(documents: Iterable[np.ndarray], vocab_size: int) -> list[int]:
    """Return the most frequent successor of each token, the lowest id on ties.

    A token without a successor gets the most frequent token overall. Documents are arrays of ids;
    pairs never span two documents.

    Raises:
        ValueError: there is no pair of tokens at all, or an id is outside the vocabulary.
    """
    total = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    waiting: list[np.ndarray] = []
    for document in documents:
        ids = document.astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"documents: token ids outside 0..{vocab_size - 1}")
        waiting.append(ids[:-1] * vocab_size + ids[1:])
        if sum(map(len, waiting)) > _MOST_WAITING:
            total = _with(total, waiting)
            waiting = []
    keys, counts = _with(total, waiting)
    if not keys.size:
        raise ValueError("documents: expected at least one with two or more tokens")
    first, second = np.divmod(keys, vocab_size)
    commonest = int(np.bincount(second, counts).argmax())
    successors = np.full(vocab_size, commonest)
    best_last = np.lexsort((-second, counts, first))  # the best pair of each first token comes last
    successors[first[best_last]] = second[best_last]
    return successors.tolist()


def _with(
    total: tuple[np.ndarray, np.ndarray], waiting: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Merge waiting pairs into the distinct pairs and their counts."""
    new = np.concatenate([np.empty(0, dtype=np.int64), *waiting])
    new_keys, new_counts = np.unique(new, return_counts=True)
    keys, index = np.unique(np.concatenate([total[0], new_keys]), return_inverse=True)
    weights = np.concatenate([total[1], new_counts])
    return keys, np.bincount(index, weights, len(keys)).astype(np.int64)
