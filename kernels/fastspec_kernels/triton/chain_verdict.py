"""Verification of one sequence's proposals: probabilities, accepted prefix, where to draw."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec_kernels.triton.overlap import wait_for_previous
from fastspec_kernels.triton.residual import column_of, prob_by_logsumexp
from fastspec_kernels.triton.rows import (
    LN_2,
    MASS_ONE,
    OUTSIDE,
    finite_or_zero,
    log_of_mass,
    merge_tiles,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    allowed,
    draft_slot,
    target_slot,
    temperature_of,
    to_float,
)


class Chain(NamedTuple):
    """The proposals, and their inputs."""

    token_ids: Any  # i32 [B, K]
    uniform_samples: Any  # f32 [B, K+1]
    logsumexp: Any  # f32 [B, K] or None
    token_map: Any  # i32 [V] or None
    num_draft: Any  # K


class Verdict(NamedTuple):
    """The decisions about each sequence, for the following launches, and the outputs."""

    position: Any  # i32 [B], row of the extra token, -1 = none
    rejected: Any  # i32 [B], step at which a proposal was rejected by chance, -1 = none
    weight: Any  # f32 [B, weighed steps], factor of the target in the residual; <= 0 = no residual
    draft_best: Any  # f32 like weight, best logit of the draft row if there is a residual
    ratio: Any  # f32 like weight, factor of that row's weights, likewise
    output_token_ids: Any  # i32 [B, K+1]
    accepted_len: Any  # i32 [B]
    logprobs: Any  # f32 [B, K+1]


@triton.jit
def verdict_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    chain,
    verdict,
    lenience,
    num_tiles,
    STEPS: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence: the standard rule."""
    wait_for_previous(PDL)
    b = tl.program_id(0)
    step = tl.arange(0, STEPS)
    tokens, num, present = proposals_of(slots, chain, b, STEPS)
    _, greedy, usable = temperature_of(sampling, b)
    target_prob, best_ids, logprob, valid, _ = probs_by_target(
        target, slots, sampling, tiles, tokens, b, num, num_tiles, STEPS, MERGED
    )
    draft_prob, draft_valid = probs_by_draft(
        draft, slots, sampling, tiles, target.vocab, chain, tokens, b, num, num_tiles, STEPS, MERGED
    )
    at = b * (chain.num_draft + 1) + step
    uniform = tl.load(chain.uniform_samples + at, mask=step < num, other=0.0).to(tl.float64)
    num, stop = end_of_chain(valid & (draft_valid | greedy), num, STEPS)
    passes = uniform * draft_prob < target_prob * lenience
    passes = tl.where(greedy, tokens == best_ids, passes) & (step < num)
    length = tl.min(tl.where(passes, OUTSIDE, step), 0)
    usable = usable & present & (length < stop)
    write_verdict(chain, verdict, b, step, tokens, logprob, length, usable, present)
    rejected = usable & (length < num) & (greedy == 0)
    tl.store(verdict.rejected + b, tl.where(rejected, length, -1))
    if draft.logits is not None:
        tl.store(verdict.weight + b, tl.where(rejected, lenience, -1.0))


@triton.jit
def proposals_of(slots, chain, b, STEPS: tl.constexpr):
    """Proposals [STEPS] of a sequence, -1 after the last; their number; whether it takes part."""
    step = tl.arange(0, STEPS)
    first = tl.load(slots.cu_rows + b)
    count = tl.load(slots.cu_rows + b + 1) - first
    at = b.to(tl.int64) * chain.num_draft + step
    tokens = tl.load(chain.token_ids + at, mask=step < chain.num_draft, other=-1)
    num = tl.minimum(tl.min(tl.where(tokens < 0, step, OUTSIDE), 0), count - 1)
    return tl.where(step < num, tokens, -1), num, count > 0


@triton.jit
def end_of_chain(valid, num, STEPS: tl.constexpr):
    """The number of proposals before the first invalid row, and that row, where texts fail."""
    step = tl.arange(0, STEPS)
    stop = tl.min(tl.where(valid | (step > num), OUTSIDE, step), 0)
    return tl.minimum(num, stop), stop


@triton.jit
def probs_by_target(
    target,
    slots,
    sampling,
    tiles,
    tokens,
    b,
    num,
    num_tiles,
    STEPS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """For each row: the proposal's probability (f64), the argmax, its logprob, validity, mass."""
    step = tl.arange(0, STEPS)
    scale, greedy, _ = temperature_of(sampling, b)
    slot = target_slot(slots, b, step)
    best, valid, maxima, masses = merge_tiles(tiles, slot, step <= num, num_tiles, scale, MERGED)
    total = tl.maximum(tl.sum(masses, 1), 1)
    row = (tl.load(slots.cu_rows + b) + step).to(tl.int64)
    known = (tokens >= 0) & (tokens < target.vocab)
    x = to_float(tl.load(target.logits + row * target.stride + tokens, mask=known, other=-INFINITY))
    if target.bitmask is not None:
        x = tl.where(allowed(target, row, tokens, known), x, -INFINITY)
    depth = (x - finite_or_zero(best)) * scale
    kept = known
    if tiles.threshold is not None:
        kept = kept & (x >= tl.load(tiles.threshold + slot, mask=step <= num, other=-INFINITY))
    weight = tl.where(kept & valid, tl.exp2(tl.where(valid, depth, 0.0)), 0.0)
    prob = weight.to(tl.float64) * MASS_ONE / total.to(tl.float64)
    best_ids = tokens * 0 - 1
    if tiles.argmax is not None and greedy:
        tile = tl.arange(0, MERGED)[None, :]
        at = slot.to(tl.int64)[:, None] * num_tiles + tile
        there = (step <= num)[:, None] & (tile < num_tiles)
        ids = tl.load(tiles.argmax + at, mask=there, other=OUTSIDE)
        best_ids = tl.min(tl.where(maxima == best[:, None], ids, OUTSIDE), 1)
    return prob, best_ids, depth * LN_2 - log_of_mass(total), valid, total


@triton.jit
def probs_by_draft(
    draft,
    slots,
    sampling,
    tiles,
    vocab,
    chain,
    tokens,
    b,
    num,
    num_tiles,
    STEPS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Probability (f64) that the drafter gave each proposal, and whether its row can be used."""
    step = tl.arange(0, STEPS)
    if draft.logits is None:
        prob = tl.full([STEPS], 1.0, tl.float64)
        valid = step >= 0
    else:
        known = (tokens >= 0) & (tokens < vocab)
        column, known = column_of(draft, chain.token_map, tokens, known)
        row = b.to(tl.int64) * draft.outer_stride + step.to(tl.int64) * draft.stride
        x = to_float(tl.load(draft.logits + row + column, mask=known, other=-INFINITY))
        if chain.logsumexp is None:
            scale, _, _ = temperature_of(sampling, b)
            slot = draft_slot(slots, b, step)
            best, valid, _, masses = merge_tiles(tiles, slot, step < num, num_tiles, scale, MERGED)
            kept = known & valid
            if tiles.threshold is not None:
                lowest = tl.load(tiles.threshold + slot, mask=step < num, other=-INFINITY)
                kept = kept & (x >= lowest)
            depth = tl.where(kept, (x - finite_or_zero(best)) * scale, -INFINITY)
            total = tl.maximum(tl.sum(masses, 1), 1).to(tl.float64)
            prob = tl.exp2(depth).to(tl.float64) * MASS_ONE / total
        else:
            at = b * chain.num_draft + step
            logsumexp = tl.load(chain.logsumexp + at, mask=step < num, other=0.0)
            prob = prob_by_logsumexp(x, sampling, b, logsumexp)
            valid = (tl.abs(logsumexp) < INFINITY) & (prob < INFINITY)
        valid = valid | (step >= num)
    return prob, valid


@triton.jit
def write_verdict(chain, verdict, b, step, tokens, logprob, length, usable, present):
    """Outputs up to the extra token, and the row it comes from."""
    accepted = usable & (step < length)
    at = b * (chain.num_draft + 1) + step
    inside = step <= chain.num_draft
    tl.store(verdict.output_token_ids + at, tl.where(accepted, tokens, -1), mask=inside)
    tl.store(verdict.logprobs + at, tl.where(accepted, logprob, 0.0), mask=inside)
    tl.store(verdict.position + b, tl.where(usable, length, -1))
    failed = tl.where(present, -1, 0)
    tl.store(verdict.accepted_len + b, tl.where(usable, length, failed))
