"""Check of the assumption of every acceptance rule that proposals come from the draft rows."""

import numpy as np

from fastspec_kernels.testing.statistics import ALPHA, assert_counts

NUM_BINS, NUM_PAIR_BINS, NUM_LEVELS = 32, 8, 40


def assert_draft_contract(
    token_ids: np.ndarray, draft_probs: np.ndarray, *, alpha: float = ALPHA
) -> None:
    """Check that tokens were drawn from the distributions that a drafter claims.

    A verifier is exact only if it gets the draft rows that the proposals were actually drawn from:
    not rows before a filter, in another precision, at another temperature, or of another position.
    Rows may all differ. The checks are

    - support: no token has claimed probability 0;
    - position: the cumulative probability at each token, plus a random part of the token's own, is
      uniform in [0, 1);
    - per token: how often each is drawn against the sum of its claimed probabilities;
    - per probability: how often tokens with a similar claimed probability are drawn against how
      often they should be; exposes errors that differ from row to row;
    - independence: the positions of neighbours are independent, which fails if a random number was
      used twice.

    Args:
        token_ids: [R] integers, array or tensor, one draw per row, in the order they were drawn.
        draft_probs: [R, V] claimed probabilities, array or tensor; rows sum to 1. For a drafter
            with logits use `logits_to_probs(draft_logits, ...)` with the parameters of verify.
        alpha: false alarm rate of each test. 1e6 draws detect a total variation of about 0.01.
    Raises:
        AssertionError: names the test, the p value, and observed and expected counts.
        ValueError: shapes do not fit together, or rows are not distributions.
    """
    tokens = np.asarray(token_ids)
    probs = np.asarray(draft_probs, dtype=np.float64)
    if probs.ndim != 2 or tokens.shape != probs.shape[:1]:
        raise ValueError(
            f"token_ids: expected shape [R] for draft_probs [R, V], got {list(tokens.shape)} and"
            f" {list(probs.shape)}"
        )
    totals = probs.sum(-1)
    if (probs < 0).any() or not np.allclose(totals, 1, atol=1e-3):
        raise ValueError(f"draft_probs: rows must add up to 1, got {totals.min()}..{totals.max()}")
    num, vocab = probs.shape
    inside = (tokens >= 0) & (tokens < vocab)
    rows = np.arange(num)
    own = np.where(inside, probs[rows, np.where(inside, tokens, 0)], 0.0)
    if not own.all():
        row = int((own == 0).argmax())
        raise AssertionError(
            f"row {row} drew token {tokens[row]}, to which it gives probability 0;"
            f" so did {int((own == 0).sum())} of {num} rows"
        )
    below = probs.cumsum(-1)[rows, tokens] - own
    places = (below + np.random.default_rng(0).random(num) * own) / totals

    def bins(number: int) -> np.ndarray:
        return np.minimum((places * number).astype(np.int64), number - 1)

    flat = np.full(NUM_BINS, 1 / NUM_BINS)
    counts = np.bincount(bins(NUM_BINS), minlength=NUM_BINS)
    assert_counts(counts, flat, "places in the cumulative distribution", alpha)
    assert_counts(
        np.bincount(tokens, minlength=vocab), probs.sum(0) / totals.sum(), "tokens", alpha
    )
    levels = np.minimum(-2 * np.log2(np.maximum(probs, 2.0**-NUM_LEVELS)), NUM_LEVELS - 1)
    levels = np.maximum(levels, 0).astype(np.int64)  # a probability may be slightly above 1
    assert_counts(
        np.bincount(levels[rows, tokens], minlength=NUM_LEVELS),
        np.bincount(levels.ravel(), probs.ravel(), minlength=NUM_LEVELS) / totals.sum(),
        "claimed probabilities, by half powers of 2",
        alpha,
        lambda level: f"up to {2 ** (-level / 2):.2g}",
    )
    pairs = bins(NUM_PAIR_BINS)[: num // 2 * 2].reshape(-1, 2)
    assert_counts(
        np.bincount(pairs[:, 0] * NUM_PAIR_BINS + pairs[:, 1], minlength=NUM_PAIR_BINS**2),
        np.full(NUM_PAIR_BINS**2, NUM_PAIR_BINS**-2.0),
        "places of neighbours",
        alpha,
        lambda cell: divmod(cell, NUM_PAIR_BINS),
    )
