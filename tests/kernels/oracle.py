"""Second, independent statement of the sampling rules, with the margin of each decision."""

import math
from typing import NamedTuple

import numpy as np

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


class Chain(NamedTuple):
    tokens: list[int]
    accepted_len: int
    logprobs: list[float]
    margin: float


def row(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Row | None:
    """The distribution of one row, or None where it has none."""
    x = np.asarray(logits, dtype=np.float64)
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


def draw(weights: np.ndarray, sample: float) -> Draw:
    """Inverse CDF of unnormalised weights; the margin is in units of the weights."""
    positive = np.flatnonzero(weights > 0)
    steps = np.cumsum(weights[positive])
    bound = sample * steps[-1]
    index = min(int(np.searchsorted(steps, bound, side="right")), len(steps) - 1)
    below = bound - steps[index - 1] if index > 0 else NO_MARGIN
    above = steps[index] - bound if index < len(steps) - 1 else NO_MARGIN
    return Draw(int(positive[index]), float(min(below, above)))


def chain(target_logits, proposals, samples, draft_logits, params, lenience=1.0) -> Chain:
    """One sequence of verify_chain; proposals end at the first -1, draft_logits may be None."""
    if len(target_logits) == 0:
        return Chain([], 0, [], NO_MARGIN)
    num = 0
    while num < min(len(proposals), len(target_logits) - 1) and proposals[num] >= 0:
        num += 1
    greedy = params["temperature"] == 0
    targets = [row(target_logits[i], **params) for i in range(num + 1)]
    drafts = None
    if draft_logits is not None and not greedy:
        drafts = [row(draft_logits[i], **params) for i in range(num)]
    if any(one is None for one in targets + (drafts or [])):
        return Chain([], -1, [], NO_MARGIN)

    tokens, logprobs, margin = [], [], NO_MARGIN
    for i in range(num):
        token = int(proposals[i])
        target, vocab = targets[i], len(targets[i].probs)
        draft = np.arange(vocab) == token if drafts is None else _widen(drafts[i].probs, vocab)
        margin = min(margin, target.margin, NO_MARGIN if drafts is None else drafts[i].margin)
        target_prob = target.probs[token] if token < vocab else 0.0
        draft_prob = draft[token] if token < vocab else 0.0
        if greedy:
            accepted = target_prob == 1
        else:
            accepted = samples[i] * draft_prob < lenience * target_prob
            if target_prob > 0:
                margin = min(margin, abs(samples[i] * draft_prob - lenience * target_prob))
        if accepted:
            tokens.append(token)
            logprobs.append(float(target.logprobs[token]))
            continue
        weights = target.probs
        if not greedy:
            residual = np.maximum(lenience * target.probs - draft, 0)
            if residual.sum() > 0:
                weights, margin = residual, min(margin, float(residual.sum()))
        break
    else:
        target, weights = targets[num], targets[num].probs
        margin = min(margin, target.margin)
    extra = draw(weights, samples[-1])
    accepted_len = len(tokens)
    tokens.append(extra.token)
    logprobs.append(float(target.logprobs[extra.token]))
    return Chain(tokens, accepted_len, logprobs, min(margin, NO_MARGIN if greedy else extra.margin))


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


def _widen(probs, vocab):
    """Draft probabilities over the target's vocabulary."""
    return np.concatenate([probs, np.zeros(vocab - len(probs))])
