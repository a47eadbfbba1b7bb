"""Pearson's chi-square test, and assertions that say which cells are wrong."""

from collections.abc import Callable

import numpy as np
import torch

ALPHA = 1e-6
MIN_EXPECTED = 10.0
NUM_WORST = 4


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """Find the probability of counts at least this far from a law.

    Cells that expect fewer than 10 are pooled. A count in a cell of probability 0 gives 0.

    Args:
        counts: integers, any shape.
        law: probabilities of the same shape, adding up to 1.
    Returns:
        The p value.
    """
    counts, law = counts.ravel().astype(float), law.ravel()
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    pooled = int(np.searchsorted(np.cumsum(expected[order]), MIN_EXPECTED)) + 1
    pooled = max(pooled, int((expected[order] < MIN_EXPECTED).sum()))
    cells = [order[:pooled]] + [np.array([one]) for one in order[pooled:]]
    if len(cells) == 1:
        return 1.0
    observed = np.array([counts[cell].sum() for cell in cells])
    wanted = np.array([expected[cell].sum() for cell in cells])
    half_statistic = torch.tensor(((observed - wanted) ** 2 / wanted).sum() / 2)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, half_statistic))


def assert_counts(
    counts: np.ndarray,
    law: np.ndarray,
    label: str,
    alpha: float = ALPHA,
    name: Callable[[int], object] = int,
) -> None:
    """Check that counts follow a law.

    Args:
        counts: integers, any shape.
        law: probabilities of the same shape, adding up to 1.
        label: what was counted.
        alpha: rate of false alarms.
        name: what the message calls the cell with a given flat index.
    Raises:
        AssertionError: gives the p value, and seen and expected counts of the worst cells.
    """
    p_value = chi_square(counts, law)
    if p_value >= alpha:
        return
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    excess = np.abs(counts - expected) / np.sqrt(np.maximum(expected, 1e-9))
    worst = [
        f"{name(int(cell))}: seen {int(counts[cell])}, expected {expected[cell]:.1f}"
        for cell in np.argsort(-excess)[:NUM_WORST]
        if excess[cell] > 0
    ]
    raise AssertionError(
        f"{label}: the counts do not follow the law, p = {p_value:.2g} < {alpha:g}"
        f" with {int(counts.sum())} draws; worst: {'; '.join(worst)}"
    )
