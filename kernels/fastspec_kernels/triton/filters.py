"""Thresholds of the filters: bounds cut the range of logits, few candidates remain, halving ends.

Launches of the whole search: 1 for min-p alone, 1 for rows of one tile, else 4; 1 more sums what
is kept. Only what the last step adds up decides, and it adds integers: no order matters.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.rows import (
    MASS_ONE,
    Tiles,
    finite_or_zero,
    merge_row,
    tile_weights,
    to_mass,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    Params,
    Rows,
    Slots,
    filters_of,
    load_any,
    locate_params,
    temperature_of,
)
from fastspec_kernels.triton.threshold import threshold_kernel
from fastspec_kernels.triton.tiles import Tiling, tiling_of

NUM_BOUNDS = 16
CHUNK = 256  # elements that a program compares with all bounds at a time
CAPACITY = 4096  # candidates of a row
# Sums of the bounds are added in f32, in any order: a bound counts only if it is clear of the need.
SLACK = tl.constexpr(1e-4)
LOWEST_LOG2_WEIGHT = tl.constexpr(43.0)


class Search(NamedTuple):
    """What the launches of a search hand on."""

    coarse: Any  # f32 [slots, num_tiles, NUM_BOUNDS], sums above the bounds of the first cut
    fine: Any  # the same of the second cut
    candidates: Any  # f32 [slots, CAPACITY]
    count: Any  # i32 [slots], candidates found, beyond the capacity too
    beyond: Any  # i64 [slots], mass above all candidates
    bracket: Any  # f32 [slots, 2], the candidates are in (low, high]


def search_thresholds(
    target: Rows,
    draft: Rows | None,
    slots: Slots,
    params: Params,
    tiles: Tiles,
    num_slots: int,
) -> None:
    """Write `tiles.threshold`, and reduce `tiles.total` to the kept logits."""
    tiling = tiling_of(target.vocab)
    args = (target, draft, slots, params, tiles)
    every_tile = num_slots * tiling.num_tiles
    searched = params.top_k is not None or params.top_p is not None
    search = None
    if searched and tiling.num_tiles > 1:
        search = _new_search(target, num_slots, tiling)
        for is_fine in (False, True):
            launch(
                cut_kernel,
                every_tile,
                *args,
                search,
                tiling.num_tiles,
                FINE=is_fine,
                TILE=tiling.tile,
                CHUNK=CHUNK,
                BOUNDS=NUM_BOUNDS,
                MERGED=tiling.merged,
                num_warps=4,
            )
        launch(
            gather_kernel,
            every_tile,
            *args,
            search,
            tiling.num_tiles,
            TILE=tiling.tile,
            BOUNDS=NUM_BOUNDS,
            CAPACITY=CAPACITY,
            MERGED=tiling.merged,
            num_warps=tiling.tile_warps,
        )
    launch(
        threshold_kernel,
        num_slots,
        *args,
        search,
        tiling.num_tiles,
        SEARCHED=searched,
        TILE=tiling.tile,
        CAPACITY=CAPACITY,
        MERGED=tiling.merged,
        num_warps=tiling.search_warps,
    )
    launch(
        kept_kernel,
        every_tile,
        *args,
        tiling.num_tiles,
        TILE=tiling.tile,
        num_warps=tiling.tile_warps,
    )


def _new_search(target: Rows, num_slots: int, tiling: Tiling) -> Search:
    new = target.logits.new_empty
    sums = (num_slots, tiling.num_tiles, NUM_BOUNDS)
    return Search(
        coarse=new(sums, dtype=torch.float32),
        fine=new(sums, dtype=torch.float32),
        candidates=new((num_slots, CAPACITY), dtype=torch.float32),
        count=new((num_slots,), dtype=torch.int32),
        beyond=new((num_slots,), dtype=torch.int64),
        bracket=new((num_slots, 2), dtype=torch.float32),
    )


@triton.jit
def cut_kernel(
    target,
    draft,
    slots,
    params,
    tiles,
    search,
    num_tiles,
    FINE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUNDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot and tile: count or mass of the tile above each bound."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    index, exists = locate_params(target, draft, slots, slot)
    need, by_count, scale, best = _need_of(
        target, draft, slots, params, tiles, slot, index, exists, num_tiles, MERGED
    )
    if need > 0:
        bounds = _coarse_bounds(tiles, slot, num_tiles, by_count, scale, best, BOUNDS, MERGED)
        sums = search.coarse
        if FINE:
            low, high = _narrow(
                search.coarse, slot, num_tiles, bounds, need, -INFINITY, best, BOUNDS, MERGED
            )
            bounds = _fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS, MERGED)
            sums = search.fine
        elif tile == 0:
            tl.store(search.count + slot, 0)
            tl.store(search.beyond + slot, 0)

        out = (slot.to(tl.int64) * num_tiles + tile) * BOUNDS + tl.arange(0, BOUNDS)
        lowest = tl.min(bounds, 0)
        sum_above = tl.zeros([BOUNDS, CHUNK], tl.float32)
        if tl.load(tiles.maximum + slot.to(tl.int64) * num_tiles + tile) > lowest:
            for start in range(0, TILE, CHUNK):
                ids = tile * TILE + start + tl.arange(0, CHUNK)
                x = load_any(target, draft, slots, slot, ids)
                worth = tl.where(by_count, 1.0, tl.exp2((x - best) * scale))
                above = x[None, :] > bounds[:, None]
                sum_above += tl.where(above, worth[None, :], 0.0)
        tl.store(sums + out, tl.sum(sum_above, 1))


@triton.jit
def gather_kernel(
    target,
    draft,
    slots,
    params,
    tiles,
    search,
    num_tiles,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot and tile: logits near the threshold, mass of those above them."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    index, exists = locate_params(target, draft, slots, slot)
    need, by_count, scale, best = _need_of(
        target, draft, slots, params, tiles, slot, index, exists, num_tiles, MERGED
    )
    if need > 0:
        bounds = _coarse_bounds(tiles, slot, num_tiles, by_count, scale, best, BOUNDS, MERGED)
        low, high = _narrow(
            search.coarse, slot, num_tiles, bounds, need, -INFINITY, best, BOUNDS, MERGED
        )
        bounds = _fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS, MERGED)
        low, high = _narrow(search.fine, slot, num_tiles, bounds, need, low, high, BOUNDS, MERGED)
        high = tl.where(by_count, best, high)  # top-p may go on among all that top-k leaves
        if tile == 0:
            tl.store(search.bracket + slot * 2, low)
            tl.store(search.bracket + slot * 2 + 1, high)
        if tl.load(tiles.maximum + slot.to(tl.int64) * num_tiles + tile) > low:
            ids = tile * TILE + tl.arange(0, TILE)
            x = load_any(target, draft, slots, slot, ids)
            beyond = tl.where(x > high, to_mass(tl.exp2((x - best) * scale)), 0)
            tl.atomic_add(search.beyond + slot, tl.sum(beyond, 0))
            found = (x > low) & (x <= high)
            place = tl.cumsum(found.to(tl.int32), 0)
            place += tl.atomic_add(search.count + slot, tl.sum(found.to(tl.int32), 0)) - 1
            out = search.candidates + slot.to(tl.int64) * CAPACITY + place
            tl.store(out, x, mask=found & (place < CAPACITY))


@triton.jit
def kept_kernel(target, draft, slots, params, tiles, num_tiles, TILE: tl.constexpr):
    """One program per slot and tile: sum of the weights that reach the threshold."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    out = slot.to(tl.int64) * num_tiles + tile
    threshold = tl.load(tiles.threshold + slot)
    if threshold > -INFINITY:
        best = tl.load(tiles.maximum + out)
        total = tl.full([], 0, tl.int64)
        if best >= threshold:
            index, _ = locate_params(target, draft, slots, slot)
            scale, _, _ = temperature_of(params, index)
            x = load_any(target, draft, slots, slot, tile * TILE + tl.arange(0, TILE))
            total = tl.sum(tl.where(x >= threshold, tile_weights(x, best, scale), 0), 0)
        tl.store(tiles.total + out, total)


@triton.jit
def _need_of(
    target,
    draft,
    slots,
    params,
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
        scale, greedy, usable = temperature_of(params, index)
        best, valid, _, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
        top_k, top_p, min_p = filters_of(target, draft, slots, params, slot, index)
        by_count = top_k > 0
        mass = (tl.sum(masses, 0).to(tl.float64) / MASS_ONE).to(tl.float32) * top_p
        need = tl.where(by_count, top_k * 1.0, tl.where(top_p < 1, mass, 0.0))
        searched = valid & usable & (greedy == 0) & (top_p > 0) & (min_p < 1)
        need = tl.where(searched, need, 0.0)
    return need, by_count, scale, best


@triton.jit
def _coarse_bounds(
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
def _fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS: tl.constexpr, MERGED: tl.constexpr):
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
def _narrow(
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
