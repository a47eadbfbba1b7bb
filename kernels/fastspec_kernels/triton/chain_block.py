"""Block verification, which verifies whole prefixes."""

import triton
import triton.language as tl

from fastspec_kernels.triton.chain_verdict import (
    end_of_chain,
    probs_by_draft,
    probs_by_target,
    proposals_of,
    write_verdict,
)
from fastspec_kernels.triton.slots import temperature_of


@triton.jit
def scales_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    chain,
    verdict,
    num_tiles,
    STEPS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per sequence: factor of the target in the residual after each prefix."""
    b = tl.program_id(0)
    step = tl.arange(0, STEPS)
    tokens, num, present = proposals_of(slots, chain, b, STEPS)
    _, greedy, usable = temperature_of(sampling, b)
    target_prob, _, _, valid, _ = probs_by_target(
        target, slots, sampling, tiles, tokens, b, num, num_tiles, STEPS, MERGED
    )
    draft_prob, draft_valid = probs_by_draft(
        draft, slots, sampling, tiles, target.vocab, chain, tokens, b, num, num_tiles, STEPS, MERGED
    )
    num, _ = end_of_chain(valid & draft_valid, num, STEPS)
    usable = usable & present & (greedy == 0)
    scales = _scales_of(target_prob, draft_prob, num, STEPS)
    at = b * chain.num_draft + step
    weight = tl.where(usable & (step < num), scales, -1.0).to(tl.float32)
    tl.store(verdict.weight + at, weight, mask=step < chain.num_draft)


@triton.jit
def block_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    chain,
    verdict,
    sums,
    num_tiles,
    STEPS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per sequence: the longest prefix that passes."""
    b = tl.program_id(0)
    step = tl.arange(0, STEPS)
    tokens, num, present = proposals_of(slots, chain, b, STEPS)
    _, greedy, usable = temperature_of(sampling, b)
    target_prob, best_ids, logprob, valid, total = probs_by_target(
        target, slots, sampling, tiles, tokens, b, num, num_tiles, STEPS, MERGED
    )
    draft_prob, draft_valid = probs_by_draft(
        draft, slots, sampling, tiles, target.vocab, chain, tokens, b, num, num_tiles, STEPS, MERGED
    )
    num, stop = end_of_chain(valid & (draft_valid | greedy), num, STEPS)
    scales = _scales_of(target_prob, draft_prob, num, STEPS)
    if draft.logits is None:
        rest = scales * (1.0 - target_prob)
    else:
        tile = tl.arange(0, MERGED)[None, :]
        at = (b * chain.num_draft + step).to(tl.int64)[:, None] * num_tiles + tile
        there = (step < num)[:, None] & (tile < num_tiles)
        masses = tl.sum(tl.load(sums + at, mask=there, other=0), 1)
        rest = scales * (masses.to(tl.float64) / total.to(tl.float64))
    bound = rest + 1.0 - scales
    bound = tl.where(bound > 0, rest / tl.where(bound > 0, bound, 1.0), 1.0)
    bound = tl.where(step == num, scales, bound)
    at = b * (chain.num_draft + 1) + step - 1
    is_draft = (step >= 1) & (step <= num)
    uniform = tl.load(chain.uniform_samples + at, mask=is_draft, other=1.0)
    length = tl.max(tl.where(is_draft & (uniform.to(tl.float64) < bound), step, 0), 0)
    if greedy:
        passes = (tokens == best_ids) & (step < num)
        length = tl.min(tl.where(passes, STEPS, step), 0)
    usable = usable & present & (length < stop)
    write_verdict(chain, verdict, b, step, tokens, logprob, length, usable, present)
    rejected = usable & (length < num) & (greedy == 0)
    tl.store(verdict.rejected + b, tl.where(rejected, length, -1))


@triton.jit
def _scales_of(target_prob, draft_prob, num, STEPS: tl.constexpr):
    """Target over draft probability of each prefix, clamped to 1 at each step: f64 [STEPS]."""
    step = tl.arange(0, STEPS)
    ratio = target_prob / tl.where(draft_prob > 0, draft_prob, 1.0)
    ratio = tl.where((draft_prob > 0) | (target_prob == 0), ratio, 1e300)
    scale = tl.full([], 1.0, tl.float64)
    scales = tl.where(step == 0, scale, 0.0)
    for i in range(0, num):
        scale = tl.minimum(scale * tl.sum(tl.where(step == i, ratio, 0.0), 0), 1.0)
        scales = tl.where(step == i + 1, scale, scales)
    return scales
