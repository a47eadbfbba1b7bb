"""Independent statement of verify_chain, one sequence at a time, with the margin of its result."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .oracle import NO_MARGIN, Row, draw, over_target_vocabulary, remembered, row, zero_margin


class Chain(NamedTuple):
    tokens: list[int]
    accepted_len: int
    logprobs: list[float]
    margin: float


@dataclass(frozen=True)
class Sequence:
    """The arguments of verify_chain that concern one sequence, in float64."""

    target_logits: np.ndarray  # [rows, V]
    proposals: list[int]
    samples: list[float]
    draft_logits: np.ndarray | None = None  # [K, draft V]
    params: dict = field(default_factory=dict)
    lenience: float = 1.0
    method: str = "standard"
    draft_logsumexp: list[float] | None = None
    draft_token_map: list[int] | None = None
    token_bitmask: np.ndarray | None = None  # [rows, words]


class Draft(NamedTuple):
    """What is known of the draft at one position."""

    proposal_prob: float | None  # None: the proposal cannot be judged
    probs: np.ndarray | None  # over the target's vocabulary; None: invalid
    margin: float  # of the filters of the row
    slack: float  # relative error of probabilities taken from float32 differences


FAILED = Chain([], -1, [], NO_MARGIN)


@remembered
def chain(sequence: Sequence) -> Chain:
    """What verify_chain makes of the sequence; the proposals end at the first -1."""
    rows, proposals = sequence.target_logits, sequence.proposals
    if len(rows) == 0:
        return Chain([], 0, [], NO_MARGIN)
    num = 0
    while num < min(len(proposals), len(rows) - 1) and proposals[num] >= 0:
        num += 1
    is_greedy = sequence.params.get("temperature") == 0
    vocab, targets, drafts = rows.shape[1], [], []
    for i in range(num + 1):  # up to the first row that says nothing, where the text fails
        targets.append(target_row(sequence, i))
        if i < num and not is_greedy:
            drafts.append(_draft_at(sequence, i, vocab))
            if drafts[i].proposal_prob is None:
                targets[i] = None
        if targets[i] is None:
            break
    drafts = drafts[: len(targets) - 1]
    if is_greedy:
        return _greedy(targets, proposals[: len(targets) - 1])
    decide = _block if sequence.method == "block" else _standard
    return decide(sequence, targets, drafts)


def target_row(sequence, index: int) -> Row | None:
    """The distribution of one of the target rows."""
    masks = sequence.token_bitmask
    bitmask = None if masks is None else masks[index]
    return row(sequence.target_logits[index], bitmask=bitmask, **sequence.params)


def prob_of(probs, token: int) -> float:
    """The probability of an id that may lie outside the vocabulary."""
    return float(probs[token]) if 0 <= token < len(probs) else 0.0


def _greedy(targets, proposals) -> Chain:
    num = 0
    while num < len(proposals) and proposals[num] == targets[num].probs.argmax():
        num += 1
    if targets[num] is None:
        return FAILED
    return _emit(targets, proposals[:num], int(targets[num].probs.argmax()), NO_MARGIN)


def _standard(sequence, targets, drafts) -> Chain:
    proposals, samples, lenience = sequence.proposals, sequence.samples, sequence.lenience
    margin = NO_MARGIN
    for i, draft in enumerate(drafts):
        target, token = targets[i], proposals[i]
        scaled = lenience * prob_of(target.probs, token)
        coin = samples[i] * draft.proposal_prob
        margin = min(margin, target.margin)
        if sequence.draft_logsumexp is None:
            margin = min(margin, draft.margin)
        if scaled > 0:
            margin = min(margin, max(abs(coin - scaled) - coin * draft.slack, 0))
        if coin < scaled:
            continue
        if draft.probs is None:
            return FAILED
        residual = np.maximum(lenience * target.probs - draft.probs, 0)
        margin = min(margin, draft.margin)
        slack = float((draft.probs * draft.slack)[residual > 0].sum())
        extra, extra_margin = _extra(sequence, i, residual, target, slack)
        return _emit(targets, proposals[:i], extra, min(margin, extra_margin))
    return _bonus(targets, proposals[: len(drafts)], samples[-1], margin)


def _block(sequence, targets, drafts) -> Chain:
    """Distances are taken between u * (rest + 1 - scale) and rest, which are probabilities."""
    proposals, samples, num = sequence.proposals, sequence.samples, len(drafts)
    filters = [target.margin for target in targets[:num]] + [draft.margin for draft in drafts]
    margin = min([NO_MARGIN, *filters])
    scales = [1.0]
    for i, draft in enumerate(drafts):
        scaled = scales[-1] * prob_of(targets[i].probs, proposals[i])
        ratio = 1.0 if draft.proposal_prob == 0 else scaled / draft.proposal_prob
        scales.append(0.0 if scaled == 0 else min(1.0, ratio))
    for length in range(num, 0, -1):
        scale = scales[length]
        rest, whole = scale, 1.0
        if length < num:
            target, draft = targets[length], drafts[length]
            rest = float(np.maximum(scale * target.probs - draft.probs, 0).sum())
            whole = rest + 1 - scale
        if scale > 0 and whole > 0:
            margin = min(margin, abs(samples[length - 1] * whole - rest))
        if whole == 0 or samples[length - 1] < rest / whole:
            break
    else:
        length = 0
    if length == num:
        return _bonus(targets, proposals[:num], samples[-1], margin)
    residual = np.maximum(scales[length] * targets[length].probs - drafts[length].probs, 0)
    extra, extra_margin = _extra(sequence, length, residual, targets[length])
    return _emit(targets, proposals[:length], extra, min(margin, extra_margin))


def _bonus(targets, accepted, sample, margin) -> Chain:
    last = targets[len(accepted)]
    if last is None:
        return FAILED
    extra = draw(last.probs, sample)
    return _emit(targets, accepted, extra.token, min(margin, last.margin, extra.margin))


def _extra(sequence, index, residual, target, slack=0.0):
    """Token and margin of a draw from the residual, or from the target where there is none."""
    total = float(residual.sum())
    extra = draw(residual if total > 0 else target.probs, sequence.samples[-1])
    if total > 0:
        return extra.token, max(min(extra.margin, total) - slack, 0)
    drafts = sequence.draft_logits
    draft_row = None if drafts is None else drafts[index]
    zero = zero_margin(target.probs, sequence.target_logits[index], draft_row)
    return extra.token, min(extra.margin, zero)


def _emit(targets, accepted, extra, margin) -> Chain:
    tokens = [*accepted, extra]
    logprobs = [float(target.logprobs[t]) for target, t in zip(targets, tokens, strict=False)]
    return Chain(tokens, len(accepted), logprobs, margin)


def _draft_at(sequence, i: int, vocab: int) -> Draft:
    """The draft distribution of proposal i, one-hot where the proposals are certain."""
    token = sequence.proposals[i]
    if sequence.draft_logits is None:
        probs = (np.arange(vocab) == token).astype(float)
        return Draft(prob_of(probs, token), probs, NO_MARGIN, 0.0)
    draft_row = row(sequence.draft_logits[i], **sequence.params)
    if sequence.draft_logsumexp is not None:
        return _draft_from_logsumexp(sequence, i, vocab, draft_row)
    if draft_row is None:
        return Draft(None, None, NO_MARGIN, 0.0)
    probs = over_target_vocabulary(draft_row.probs, vocab, sequence.draft_token_map)
    return Draft(prob_of(probs, token), probs, draft_row.margin, 0.0)


def _draft_from_logsumexp(sequence, i, vocab, draft_row) -> Draft:
    """The proposal's probability from its own logit; the others count after a rejection only."""
    logits, logsumexp = sequence.draft_logits[i], sequence.draft_logsumexp[i]
    token, columns = sequence.proposals[i], sequence.draft_token_map
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(
            np.isneginf(logits), -np.inf, logits / sequence.params.get("temperature", 1)
        )
        weights = np.exp(scaled - logsumexp)
    known = columns is None or token < vocab
    column = token if columns is None or not known else columns[token]
    logit = logits[column] if known and 0 <= column < len(logits) else -np.inf
    valid = not (np.isnan(logit) or np.isposinf(logit))
    valid = valid and not (np.isnan(logsumexp) or np.isposinf(logsumexp))
    proposal_prob = 0.0 if np.isneginf(logit) else float(weights[column])
    slack = 0.0 if not np.isfinite(logsumexp) else abs(logsumexp) * 2.0**-21
    if draft_row is None:
        return Draft(proposal_prob if valid else None, None, NO_MARGIN, slack)
    kept = np.where(draft_row.kept, weights, 0.0)
    probs = over_target_vocabulary(kept, vocab, columns)
    return Draft(proposal_prob if valid else None, probs, draft_row.margin, slack)
