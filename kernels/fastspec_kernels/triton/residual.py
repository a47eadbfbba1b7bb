"""The residual distribution: weights max(target - ratio * draft, 0)."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import MASS_ONE, merge_row, threshold_of, to_mass
from fastspec_kernels.triton.slots import (
    INFINITY,
    draft_slot,
    find_target,
    load_draft,
    load_logits,
    target_slot,
    temperature_of,
)


@triton.jit
def residual_of_tile(
    target,
    draft,
    slots,
    sampling,
    tiles,
    draft_slots,
    draft_tiles,
    chain,
    b,
    step,
    weight,
    tile,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Masses [TILE] of max(weight * target - draft, 0), in units of weight * target's best."""
    scale, _, _ = temperature_of(sampling, b)
    slot = target_slot(slots, b, step)
    offset, row, _, _ = find_target(target, slots, slot)
    best, _, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    lowest = threshold_of(tiles, slot)
    draft_best, draft_prob, draft_lowest = draft_row_of(
        draft_slots, draft_tiles, sampling, chain, b, step, num_tiles, MERGED
    )
    target_prob = MASS_ONE / tl.sum(masses, 0).to(tl.float64)  # of the best logit
    ratio = tl.minimum(draft_prob / (target_prob * weight), 1e30).to(tl.float32)

    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < target.vocab
    x = load_logits(target, offset, row, ids, inside)
    y = load_at_target_ids(draft, chain.token_map, b, step, ids, inside)
    return residual_masses(x, best, lowest, y, draft_best, draft_lowest, scale, ratio)


@triton.jit
def draft_row_of(
    draft_slots,
    draft_tiles,
    sampling,
    chain,
    b,
    step,
    num_tiles,
    MERGED: tl.constexpr,
):
    """Best logit of a draft row, its probability (f64), and the lowest kept logit."""
    scale, _, _ = temperature_of(sampling, b)
    slot = draft_slot(draft_slots, b, step if draft_slots.position is None else 0)
    best, _, _, masses = merge_row(draft_tiles, slot, num_tiles, scale, MERGED)
    if chain.logsumexp is None:
        prob = MASS_ONE / tl.maximum(tl.sum(masses, 0), 1).to(tl.float64)
    else:
        prob = prob_by_logsumexp(
            best, sampling, b, tl.load(chain.logsumexp + b * chain.num_draft + step)
        )
    return best, prob, threshold_of(draft_tiles, slot)


@triton.jit
def prob_by_logsumexp(x, sampling, b, logsumexp):
    """Probability exp(x / T - logsumexp) in f64; 0 where x is -inf."""
    temperature = 1.0
    if sampling.temperature is not None:
        temperature = tl.load(sampling.temperature + b).to(tl.float64)
    exponent = x.to(tl.float64) / temperature - logsumexp.to(tl.float64)
    return tl.where(x > -INFINITY, tl.exp(exponent), tl.where(x == -INFINITY, 0.0, x))


@triton.jit
def load_at_target_ids(draft, token_map, b, step, ids, inside):
    """Logits of a draft row by target token; -inf where the drafter does not have the token."""
    column, inside = column_of(draft, token_map, ids, inside)
    offset = b.to(tl.int64) * draft.outer_stride + step.to(tl.int64) * draft.stride
    return load_draft(draft, offset, column, inside)


@triton.jit
def column_of(draft, token_map, ids, inside):
    """The column of target tokens in the draft rows, and whether there is one."""
    column = ids
    if token_map is not None:
        column = tl.load(token_map + ids, mask=inside, other=-1)
    return column, inside & (column >= 0) & (column < draft.vocab)


@triton.jit
def residual_masses(x, best, lowest, y, draft_best, draft_lowest, scale, ratio):
    """Masses of max(target - ratio * draft, 0), both relative to their best logits."""
    target_weight = tl.where(x >= lowest, tl.exp2((x - best) * scale), 0.0)
    draft_weight = tl.where(y >= draft_lowest, tl.exp2((y - draft_best) * scale), 0.0)
    return to_mass(tl.maximum(tl.fma(-draft_weight, ratio, target_weight), 0.0))
