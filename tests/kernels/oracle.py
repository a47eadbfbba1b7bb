"""Second, independent statement of the sampling rules, with the margin of each decision."""

import hashlib
import math
import pickle
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, TypeVar

import numpy as np

Question, Answer = TypeVar("Question"), TypeVar("Answer")

NO_MARGIN = math.inf


class Row(NamedTuple):
    """The filtered distribution of one row; `margin` is how far it is from another kept set."""

    probs: np.ndarray
    logprobs: np.ndarray
    logsumexp: float
    kept: np.ndarray
    margin: float


class Draw(NamedTuple):
    token: int
    margin: float


def remembered(function: Callable[[Question], Answer]) -> Callable[[Question], Answer]:
    """Answer a question once: every backend and every instruction set asks the same ones."""
    answers: dict[bytes, Answer] = {}

    @wraps(function)
    def ask(question: Question) -> Answer:
        key = hashlib.sha256(pickle.dumps(question)).digest()
        if key not in answers:
            answers[key] = function(question)
        return answers[key]

    return ask


def row(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, bitmask=None) -> Row | None:
    """The distribution of one row, or None where it has none."""
    x = np.asarray(logits, dtype=np.float64)
    if bitmask is not None:
        x = np.where(allowed_tokens(bitmask, len(x)), x, -np.inf)
    if not temperature >= 0 or np.isnan(x).any() or (x == np.inf).any() or not np.isfinite(x).any():
        return None
    best = x.max()
    if temperature == 0:
        probs = np.zeros(len(x))
        probs[int(np.flatnonzero(x == best)[0])] = 1
        total = np.exp(x - best).sum()
        logprobs = x - best - math.log(total)
        return Row(probs, logprobs, best + math.log(total), x == best, NO_MARGIN)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scaled = np.where(np.isfinite(x), (x - best) / temperature, -np.inf)
    weights = np.exp(scaled)
    kept = np.ones(len(x), dtype=bool)
    margin = NO_MARGIN
    if 0 < top_k < len(x):
        kept = x >= np.sort(x)[-top_k]
    if top_p < 1:
        kept, margin = _top_p(x, weights, kept, top_p)
    if min_p >= 1:
        kept = kept & (x == best)
    elif min_p > 0:
        margin = min(margin, float(np.abs(weights[kept] - min_p).min()))
        kept = kept & (weights >= min_p)
    weights = np.where(kept, weights, 0.0)
    total = weights.sum()
    with np.errstate(divide="ignore"):
        logprobs = np.where(kept, scaled, -np.inf) - math.log(total)
    return Row(weights / total, logprobs, best / temperature + math.log(total), kept, margin)


def allowed_tokens(bitmask, vocab: int) -> np.ndarray:
    """Which of the tokens have their bit set in the 32-bit words of a row's bitmask."""
    token = np.arange(vocab)
    return (np.asarray(bitmask, dtype=np.int64)[token // 32] >> token % 32) % 2 == 1


def over_target_vocabulary(values, vocab: int, draft_token_map=None) -> np.ndarray:
    """Values of a draft row by target token; 0 for a token that the drafter does not have."""
    columns = np.arange(vocab) if draft_token_map is None else np.asarray(draft_token_map)
    known = (columns >= 0) & (columns < len(values))
    return np.where(known, np.asarray(values)[np.where(known, columns, 0)], 0.0)


def zero_margin(probs, target_logits, draft_logits) -> float:
    """Margin of a difference of 0: certain of equal rows and one-hot ones, else due to rounding."""
    same = np.array_equal(target_logits, draft_logits, equal_nan=True)
    return NO_MARGIN if same or probs.max() == 1 else 0.0


def draw(weights: np.ndarray, sample: float) -> Draw:
    """Inverse CDF of unnormalised weights; the margin is in units of the weights."""
    positive = np.flatnonzero(weights > 0)
    steps = np.cumsum(weights[positive])
    bound = sample * steps[-1]
    index = min(int(np.searchsorted(steps, bound, side="right")), len(steps) - 1)
    below = bound - steps[index - 1] if index > 0 else NO_MARGIN
    above = steps[index] - bound if index < len(steps) - 1 else NO_MARGIN
    return Draw(int(positive[index]), float(min(below, above)))


def race(row: Row, noise: np.ndarray) -> Draw:
    """Gumbel-max; the margin is between the two largest sums."""
    sums = np.where(row.kept, row.logprobs + noise, -np.inf)
    best, second = np.sort(sums)[::-1][:2] if len(sums) > 1 else (0.0, -np.inf)
    return Draw(int(sums.argmax()), float(best - second))


def _top_p(x, weights, kept, top_p):
    """Kept set and margin of the nucleus: a value stays while less than top_p lies above it."""
    values, inverse = np.unique(x[kept], return_inverse=True)
    mass = np.zeros(len(values))
    np.add.at(mass, inverse, weights[kept])
    above = (np.cumsum(mass[::-1]) - mass[::-1])[::-1] / mass.sum()
    stays = above < top_p
    stays[-1] = True
    lowest = values[stays][0]
    margin = float(np.abs(above[:-1] - top_p).min()) if len(values) > 1 else NO_MARGIN
    return kept & (x >= lowest), margin
