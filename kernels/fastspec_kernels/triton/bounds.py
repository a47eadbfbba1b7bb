"""Bounds of a row's threshold: first from a sample, then from sums over the row."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import MASS_ONE, finite_or_zero, from_key, merge_row, to_key
from fastspec_kernels.triton.slots import INFINITY, filters_of, temperature_of

# Sums for the bounds are in f32, in any order: a bound counts only if it is clear of the need.
SLACK = tl.constexpr(1e-4)
# A sampled bound is clear of the need by this many standard deviations and this many logits. It is
# checked later, and a row for which it does not hold is searched slowly.
DEVIATIONS = tl.constexpr(4.5)
CLEARANCE = tl.constexpr(6.0)
MANY = tl.constexpr(32)
RUN = tl.constexpr(4)  # neighbours sampled together: they share a sector of memory


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
    """The count or mass that the logits above the threshold fall short of (0 = no search).

    Then the mass of all but the need, the factor of log2-weights and the best logit.
    """
    need = 0.0
    by_count = slot < 0
    rest = 0.0
    scale = 1.0
    best = 0.0
    if exists:
        scale, greedy, usable = temperature_of(sampling, index)
        best, valid, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
        top_k, top_p, min_p = filters_of(target, draft, slots, sampling, slot, index)
        by_count = top_k > 0
        mass = (tl.sum(masses, 0).to(tl.float64) / MASS_ONE).to(tl.float32)
        rest = mass * (1 - top_p)
        need = tl.where(by_count, top_k * 1.0, tl.where(top_p < 1, mass * top_p, 0.0))
        # As in threshold_kernel, including NaN: whatever that reads must have been written.
        only_best = (top_p <= 0) | (min_p >= 1)
        searched = valid & usable & (greedy == 0) & (only_best == 0)
        need = tl.where(searched, need, 0.0)
    return need, by_count, rest, scale, best


@triton.jit
def sampled_ids(vocab, SAMPLE: tl.constexpr):
    """Runs of neighbours, one in each of equal parts of a row; all of a row that has fewer.

    Positions within parts are scrambled, as logits with periodic structure would bias the sample.
    """
    place = tl.arange(0, SAMPLE)
    part = place // RUN
    parts = SAMPLE // RUN
    spread = (part.to(tl.int64) * vocab // parts).to(tl.int32)
    start = tl.where(vocab < SAMPLE, part * RUN, spread)
    size = tl.maximum(vocab // parts, RUN)
    mixed = part.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    shift = (mixed >> 16).to(tl.int32) % (size - RUN + 1)
    return start + shift + place % RUN


@triton.jit
def bracket_by_count(x, need, share, best, limit, ZEROS: tl.constexpr):
    """(low, high], likely around the threshold, and how many of the sample x are above low.

    With more than `limit`, a high other than the best logit is worthwhile.
    """
    expected = need * share
    spread = DEVIATIONS * tl.sqrt(expected)
    enough = expected + spread + CLEARANCE
    low, _, above_low, _ = _last_bound(x, x, enough, best, True, False, ZEROS)
    high = best
    if above_low > limit:
        few = expected - spread - 1
        _, high, _, _ = _last_bound(x, x, few, best, True, True, ZEROS)
    return low, high, above_low


@triton.jit
def bracket_by_mass(x, rest, share, scale, best, limit, ZEROS: tl.constexpr):
    """Like bracket_by_count, if all but `rest` of the mass is above the threshold.

    The number is that of samples in (low, high].
    """
    weight = tl.exp2((x - best) * scale)
    rest = rest * share
    low, _, above_low, _ = _last_bound(x, weight, rest, best, False, False, ZEROS)
    high = best
    above_high = 0
    if above_low > limit:
        _, bound, _, count = _last_bound(x, weight, rest, best, False, True, ZEROS)
        if count >= MANY:
            high = bound
            above_high = count
    return low, high, above_low - above_high


@triton.jit
def _last_bound(
    x,
    weight,
    goal,
    best,
    BY_COUNT: tl.constexpr,
    HIGH: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The last bound clearly below the threshold, or, if HIGH, the first clearly above it.

    Found by bisection, as far as the sample can tell bounds apart. Returns both ends of the final
    interval and the counts of the sample above them.
    """
    first = to_key(best * 0 - INFINITY) >> ZEROS
    last = to_key(best) >> ZEROS
    above_first = tl.sum((x > -INFINITY).to(tl.int32), 0)
    above_last = 0
    while (last - first > 1) & (above_first - above_last > 2):
        middle = first + ((last - first) >> 1)
        above = x > from_key(middle << ZEROS)
        count = tl.sum(above.to(tl.int32), 0)
        if BY_COUNT:
            below = count > goal if HIGH else count >= goal
        else:
            under = tl.where(above, 0.0, weight)
            mass = tl.sum(under, 0)
            spread = DEVIATIONS * tl.sqrt(tl.sum(under * under, 0))
            # With few samples above a bound, the weight of the logits below it is unknown.
            if HIGH:
                below = (mass - spread < goal) & (count >= MANY)
            else:
                below = (mass + spread <= goal) & (count >= CLEARANCE)
        first = tl.where(below, middle, first)
        above_first = tl.where(below, count, above_first)
        last = tl.where(below, last, middle)
        above_last = tl.where(below, above_last, count)
    return from_key(first << ZEROS), from_key(last << ZEROS), above_first, above_last


@triton.jit
def range_of(tiles, slot, num_tiles, MERGED: tl.constexpr):
    """The best and the lowest finite logit of a valid row."""
    tile = tl.arange(0, MERGED)
    at = slot.to(tl.int64) * num_tiles + tile
    best = tl.max(tl.load(tiles.maximum + at, mask=tile < num_tiles, other=-INFINITY), 0)
    lowest = tl.min(tl.load(tiles.minimum + at, mask=tile < num_tiles, other=INFINITY), 0)
    return best, lowest


@triton.jit
def fine_bounds(low, high, lowest, BOUNDS: tl.constexpr):
    """Bounds in equal steps between low and high."""
    low = tl.maximum(low, lowest)
    step = tl.minimum(high - low, 1e38) / (BOUNDS + 1)
    return low + step * (tl.arange(0, BOUNDS) + 1)


@triton.jit
def narrow(
    sums,
    slot,
    parts,
    bounds,
    need,
    low,
    high,
    BOUNDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Narrow (low, high] by the sums above the bounds."""
    part = tl.arange(0, PARTS)[:, None]
    at = (slot.to(tl.int64) * parts + part) * BOUNDS + tl.arange(0, BOUNDS)[None, :]
    above = tl.sum(tl.load(sums + at, mask=part < parts, other=0.0), 0)
    low = tl.maximum(low, tl.max(tl.where(above >= need * (1 + SLACK), bounds, -INFINITY), 0))
    high = tl.minimum(high, tl.min(tl.where(above < need * (1 - SLACK), bounds, INFINITY), 0))
    return low, finite_or_zero(high)
