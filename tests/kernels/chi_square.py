"""Pearson's chi-square test with pooled cells."""

import numpy as np
from scipy.stats import chi2

MIN_EXPECTED = 10.0


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Probability of counts at least this far from the law; cells expected below 10 are pooled.

    A count in a cell of probability 0 gives 0.
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
    observed = np.array([counts[cell].sum() for cell in cells])
    wanted = np.array([expected[cell].sum() for cell in cells])
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(chi2.sf(statistic, len(cells) - 1))
