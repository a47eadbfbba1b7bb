"""Bounds that cut the range in which the threshold of a row lies."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import MASS_ONE, finite_or_zero, merge_row
from fastspec_kernels.triton.slots import INFINITY, filters_of, temperature_of

# Sums of the bounds are added in f32, in any order: a bound counts only if it is clear of the need.
SLACK = tl.constexpr(1e-4)
LOWEST_LOG2_WEIGHT = tl.constexpr(43.0)


@triton.jit
def need_of(
    target,
    draft,
    slots,
    sampling,
    tiles,
    slot,
    index,
    exists,
    num_tiles,
    MERGED: tl.constexpr,
):
    """What the logits above the threshold fall short of (0 = no search), by count or mass."""
    need = 0.0
    by_count = slot < 0
    scale = 1.0
    best = 0.0
    if exists:
        scale, greedy, usable = temperature_of(sampling, index)
        best, valid, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
        top_k, top_p, min_p = filters_of(target, draft, slots, sampling, slot, index)
        by_count = top_k > 0
        mass = (tl.sum(masses, 0).to(tl.float64) / MASS_ONE).to(tl.float32) * top_p
        need = tl.where(by_count, top_k * 1.0, tl.where(top_p < 1, mass, 0.0))
        # As in threshold_kernel, NaN included: what it reads must have been written.
        only_best = (top_p <= 0) | (min_p >= 1)
        searched = valid & usable & (greedy == 0) & (only_best == 0)
        need = tl.where(searched, need, 0.0)
    return need, by_count, scale, best


@triton.jit
def coarse_bounds(
    tiles, slot, num_tiles, by_count, scale, best, BOUNDS: tl.constexpr, MERGED: tl.constexpr
):
    """Bounds over the range of logits that weigh anything, closer at the top."""
    lowest = _lowest_logit(tiles, slot, num_tiles, MERGED)
    depth = tl.minimum(best - lowest, 1e38)
    depth = tl.where(
        by_count,
        depth,
        tl.minimum(depth, tl.full([], LOWEST_LOG2_WEIGHT, tl.float32) / tl.maximum(scale, 1e-30)),
    )
    share = (tl.arange(0, BOUNDS) + 1) / BOUNDS
    return best - depth * share * share


@triton.jit
def fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS: tl.constexpr, MERGED: tl.constexpr):
    """Bounds in equal steps between low and high."""
    low = tl.maximum(low, _lowest_logit(tiles, slot, num_tiles, MERGED))
    step = tl.minimum(high - low, 1e38) / (BOUNDS + 1)
    return low + step * (tl.arange(0, BOUNDS) + 1)


@triton.jit
def _lowest_logit(tiles, slot, num_tiles, MERGED: tl.constexpr):
    tile = tl.arange(0, MERGED)
    minima = tiles.minimum + slot.to(tl.int64) * num_tiles + tile
    return tl.min(tl.load(minima, mask=tile < num_tiles, other=INFINITY), 0)


@triton.jit
def narrow(
    sums,
    slot,
    num_tiles,
    bounds,
    need,
    low,
    high,
    BOUNDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Cut (low, high] by the sums above the bounds."""
    tile = tl.arange(0, MERGED)[:, None]
    at = (slot.to(tl.int64) * num_tiles + tile) * BOUNDS + tl.arange(0, BOUNDS)[None, :]
    above = tl.sum(tl.load(sums + at, mask=tile < num_tiles, other=0.0), 0)
    low = tl.maximum(low, tl.max(tl.where(above >= need * (1 + SLACK), bounds, -INFINITY), 0))
    high = tl.minimum(high, tl.min(tl.where(above < need * (1 - SLACK), bounds, INFINITY), 0))
    return low, finite_or_zero(high)
