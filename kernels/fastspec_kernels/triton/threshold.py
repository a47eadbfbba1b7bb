"""The exact threshold of one row, by bisecting an interval of floats."""

import triton
import triton.language as tl

from fastspec_kernels.triton.rows import from_key, merge_row, to_key, to_mass
from fastspec_kernels.triton.slots import (
    INFINITY,
    filters_of,
    flag,
    load_any,
    locate_params,
    temperature_of,
)


@triton.jit
def threshold_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    search,
    num_tiles,
    SEARCHED: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    ZEROS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot: the lowest logit that all filters keep; -inf where none is on.

    The logits are multiples of 2**ZEROS as keys.
    """
    slot = tl.program_id(0)
    threshold = tl.full([], 0.0, tl.float32) - INFINITY
    index, exists = locate_params(target, draft, slots, slot)
    if exists:
        scale, greedy, usable = temperature_of(sampling, index)
        best, valid, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
        top_k, top_p, min_p = filters_of(target, draft, slots, sampling, slot, index)
        on = valid & usable & (greedy == 0)
        only_best = (top_p <= 0) | (min_p >= 1)
        mass = tl.sum(masses, 0)
        if SEARCHED and on & (only_best == 0) & ((top_k > 0) | (top_p < 1)):
            found = flag(slot < 0)
            if search is None:
                x = load_any(target, draft, slots, slot, tl.arange(0, TILE))
                weights = to_mass(tl.exp2((x - best) * scale))
                threshold, found = _among(
                    x, weights, TILE, threshold, best, 0, mass, top_k, top_p, TILE, ZEROS
                )
            else:
                if tl.load(search.plan + slot) != 0:
                    count = tl.load(search.count + slot)
                    if count <= FEW:
                        threshold, found = _among_candidates(
                            search,
                            slot,
                            count,
                            best,
                            scale,
                            mass,
                            top_k,
                            top_p,
                            FEW,
                            CAPACITY,
                            ZEROS,
                        )
                    elif count <= CAPACITY:
                        threshold, found = _among_candidates(
                            search,
                            slot,
                            count,
                            best,
                            scale,
                            mass,
                            top_k,
                            top_p,
                            CAPACITY,
                            CAPACITY,
                            ZEROS,
                        )
                if found == 0:
                    threshold = _in_whole_row(
                        target,
                        draft,
                        slots,
                        slot,
                        num_tiles,
                        best,
                        scale,
                        mass,
                        top_k,
                        top_p,
                        TILE,
                        ZEROS,
                    )
        if sampling.min_p is not None and on & (min_p > 0) & (min_p < 1):
            threshold = tl.maximum(threshold, _min_p_bound(sampling, index, best, min_p))
        threshold = tl.where(on & only_best, best, threshold)
    tl.store(tiles.threshold + slot, threshold)


@triton.jit
def _among_candidates(
    search,
    slot,
    count,
    best,
    scale,
    mass,
    top_k,
    top_p,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The threshold, if the candidates contain it, and whether they do."""
    place = tl.arange(0, BLOCK)
    candidates = search.candidates + slot.to(tl.int64) * CAPACITY + place
    x = tl.load(candidates, mask=place < count, other=-INFINITY)
    low = tl.load(search.bracket + slot * 2)
    high = tl.where(top_k > 0, best, tl.load(search.bracket + slot * 2 + 1))
    beyond = tl.load(search.beyond + slot)
    weights = to_mass(tl.exp2((x - best) * scale))
    return _among(x, weights, count, low, high, beyond, mass, top_k, top_p, BLOCK, ZEROS)


@triton.jit
def _among(
    x,
    weights,
    count,
    low,
    high,
    beyond,
    mass,
    top_k,
    top_p,
    BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The threshold in [low, high], from the `count` logits above low, and whether it is there.

    Logits above high have the mass `beyond`.
    """
    threshold = low
    found = flag(low == -INFINITY)
    if top_k > 0:
        found = found | flag(count >= top_k)
        ones = tl.full([BLOCK], 1, tl.int32)
        threshold = _lowest_short(x, ones, low, high, top_k, BLOCK, ZEROS)
        mass = tl.sum(tl.where(x >= threshold, weights, 0), 0)
    if top_p < 1:
        need = _share_of(mass, top_p) - beyond
        if top_k == 0:
            found = (found | flag(tl.sum(weights, 0) >= need)) & flag(need > 0)
        threshold = _lowest_short(x, weights, threshold, high, need, BLOCK, ZEROS)
    return threshold, found


@triton.jit
def _lowest_short(x, worth, low, high, need, BLOCK: tl.constexpr, ZEROS: tl.constexpr):
    """The lowest x or bound in [low, high] above which the total worth is less than the need."""
    if BLOCK <= 64:  # all pairs at once
        above = tl.sum(tl.where(x[None, :] > x[:, None], worth[None, :], 0), 1)
        return tl.min(tl.where(above < need, x, INFINITY), 0)
    else:
        first = to_key(low) >> ZEROS
        last = to_key(high) >> ZEROS
        while first < last:
            middle = first + ((last - first) >> 1)
            above = tl.sum(tl.where(x > from_key(middle << ZEROS), worth, 0), 0)
            first, last = _halve(first, middle, last, above < need)
        return from_key(first << ZEROS)


@triton.jit
def _in_whole_row(
    target,
    draft,
    slots,
    slot,
    num_tiles,
    best,
    scale,
    mass,
    top_k,
    top_p,
    TILE: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The threshold of a row whose candidates lack it; reads the row for every step."""
    lowest = to_key(best * 0 - INFINITY) >> ZEROS
    first = lowest
    last = to_key(best) >> ZEROS
    if top_k > 0:
        while first < last:
            middle = first + ((last - first) >> 1)
            bound = from_key(middle << ZEROS)
            count, _ = _above(target, draft, slots, slot, num_tiles, best, scale, bound, TILE)
            first, last = _halve(first, middle, last, count < top_k)
        # Those above the key below the threshold: the threshold itself is kept.
        bound = from_key((first - 1) << ZEROS)
        if first > lowest:
            _, mass = _above(target, draft, slots, slot, num_tiles, best, scale, bound, TILE)
        last = to_key(best) >> ZEROS
    if top_p < 1:
        need = _share_of(mass, top_p)
        while first < last:
            middle = first + ((last - first) >> 1)
            bound = from_key(middle << ZEROS)
            _, above = _above(target, draft, slots, slot, num_tiles, best, scale, bound, TILE)
            first, last = _halve(first, middle, last, above < need)
    return from_key(first << ZEROS)


@triton.jit
def _above(target, draft, slots, slot, num_tiles, best, scale, bound, TILE: tl.constexpr):
    """Count and mass of the logits above a bound."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0, tl.int64)
    for tile in range(0, num_tiles):
        x = load_any(target, draft, slots, slot, tile * TILE + tl.arange(0, TILE))
        count += tl.sum((x > bound).to(tl.int32), 0)
        mass += tl.sum(tl.where(x > bound, to_mass(tl.exp2((x - best) * scale)), 0), 0)
    return count, mass


@triton.jit
def _halve(first, middle, last, falls_short):
    return tl.where(falls_short, first, middle + 1), tl.where(falls_short, middle, last)


@triton.jit
def _share_of(mass, top_p):
    """The smallest integer mass that is at least top_p of the mass."""
    exact = mass.to(tl.float64) * top_p
    share = exact.to(tl.int64)
    return tl.maximum(share + (share.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _min_p_bound(sampling, index, best, min_p):
    """The best logit plus T * ln(min_p), rounded up."""
    temperature = 1.0
    if sampling.temperature is not None:
        temperature = tl.load(sampling.temperature + index)
    exact = best.to(tl.float64) + tl.log(min_p.to(tl.float64)) * temperature
    bound = exact.to(tl.float32)
    return tl.where(bound.to(tl.float64) < exact, from_key(to_key(bound) + 1), bound)
