"""The residual distribution: weights max(target - ratio * draft, 0)."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import MASS_ONE, MASS_UNIT, merge_row, threshold_of
from fastspec_kernels.triton.slots import (
    INFINITY,
    draft_slot,
    load_draft,
    target_slot,
    temperature_of,
)


@triton.jit
def ratio_of(
    slots,
    sampling,
    tiles,
    draft_slots,
    draft_tiles,
    chain,
    b,
    step,
    weight,
    num_tiles,
    MERGED: tl.constexpr,
):
    """Best logits of a step's target and draft rows, and the factor of the draft's weights.

    The residual is max(target - factor * draft, 0), both relative to their best logits.
    """
    scale, _, _ = temperature_of(sampling, b)
    slot = target_slot(slots, b, step)
    best, _, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    draft_best, draft_prob, _ = draft_row_of(
        draft_slots, draft_tiles, sampling, chain, b, step, num_tiles, MERGED
    )
    target_prob = MASS_ONE / tl.sum(masses, 0).to(tl.float64)  # of the best logit
    ratio = tl.minimum(draft_prob / (target_prob * weight), 1e30).to(tl.float32)
    return best, draft_best, ratio


@triton.jit
def slot_of_draft(draft_slots, b, step):
    """The slot of a step's draft row, which may be the only one of its sequence."""
    return draft_slot(draft_slots, b, step if draft_slots.position is None else 0)


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
    slot = slot_of_draft(draft_slots, b, step)
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
def residual_weights(x, best, lowest, y, draft_best, draft_lowest, scale, ratio):
    """Weights of max(target - ratio * draft, 0), both relative to their best logits.

    Those too small to have a mass are 0.
    """
    # Comparisons with -inf, where nothing is filtered, compile to nothing this way round.
    target_weight = tl.where(x < lowest, 0.0, tl.exp2((x - best) * scale))
    draft_weight = tl.where(y < draft_lowest, 0.0, tl.exp2((y - draft_best) * scale))
    rest = tl.fma(-draft_weight, ratio, target_weight)
    return tl.where(rest >= MASS_UNIT, rest, 0.0)
