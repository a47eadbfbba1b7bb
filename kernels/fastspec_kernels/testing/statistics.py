"""Pearson's chi-square test, and assertions that name the wrong cells."""

from collections.abc import Callable, Collection

import numpy as np
import torch

ALPHA = 1e-6
MIN_EXPECTED = 10.0
MIN_DRAWS = 1000
NUM_WORST = 4


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Compute the probability of counts at least this far from a distribution.

    Cells that expect fewer than 10 are pooled. A count in a cell of probability 0 gives 0.

    Args:
        counts: integers, any shape.
        probs: probabilities of the same shape, with sum 1.
    Returns:
        The p value.
    Raises:
        ValueError: nothing was counted, or probs do not add up to 1.
    """
    counts, probs = counts.ravel().astype(float), probs.ravel()
    if not counts.sum() > 0:
        raise ValueError("counts: nothing was counted")
    if not ((probs >= 0).all() and abs(probs.sum() - 1) < 1e-3):
        raise ValueError(
            f"probs: expected probabilities that add up to 1, got a sum of {probs.sum()}"
        )
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
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


def require_a_test(cases: Collection[str], num_draws: int, alpha: float) -> None:
    """Refuse arguments with which any verifier would pass."""
    if not cases:
        raise ValueError("cases: expected at least one")
    if num_draws < MIN_DRAWS:
        raise ValueError(f"num_draws: expected at least {MIN_DRAWS}, got {num_draws}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha: expected a number between 0 and 1, got {alpha}")


def assert_counts(
    counts: np.ndarray,
    probs: np.ndarray,
    label: str,
    alpha: float = ALPHA,
    name: Callable[[int], object] = int,
) -> None:
    """Check that counts follow a distribution.

    Args:
        counts: integers, any shape.
        probs: probabilities of the same shape, with sum 1.
        label: what was counted.
        alpha: false alarm rate.
        name: returns the name, for the message, of the cell with a given flat index.
    Raises:
        AssertionError: gives the p value, and observed and expected counts of the worst cells.
    """
    p_value = chi_square(counts, probs)
    if p_value >= alpha:
        return
    counts, expected = counts.ravel(), probs.ravel() * counts.sum()
    excess = np.abs(counts - expected) / np.sqrt(np.maximum(expected, 1e-9))
    worst = [
        f"{name(int(cell))}: seen {int(counts[cell])}, expected {expected[cell]:.1f}"
        for cell in np.argsort(-excess)[:NUM_WORST]
        if excess[cell] > 0
    ]
    raise AssertionError(
        f"{label}: the counts do not follow the distribution, p = {p_value:.2g} < {alpha:g}"
        f" with {int(counts.sum())} draws; worst: {'; '.join(worst)}"
    )
