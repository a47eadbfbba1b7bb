"""Thresholds of the filters: bounds cut the range of logits, few candidates remain, halving ends.

Launches of the whole search: 1 for min-p alone, 1 for rows of one tile, else 4; 1 more sums what
is kept. Only what the last step adds up decides, and it adds integers: no order matters.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastspec_kernels.triton.bounds import coarse_bounds, fine_bounds, narrow, need_of
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.rows import (
    Tiles,
    sum_weights,
    to_mass,
    weights_of,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    Params,
    Rows,
    Slots,
    load_any,
    locate_params,
    temperature_of,
)
from fastspec_kernels.triton.threshold import threshold_kernel
from fastspec_kernels.triton.tiles import Tiling, tiling_of

NUM_BOUNDS = 16
CHUNK = 256  # elements that a program compares with all bounds at a time
CAPACITY = 4096  # candidates of a row


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
    draft: Rows,
    slots: Slots,
    sampling: Params,
    tiles: Tiles,
    num_slots: int,
) -> None:
    """Write `tiles.threshold`, and reduce `tiles.total` to the kept logits."""
    tiling = tiling_of(target.vocab)
    args = (target, draft, slots, sampling, tiles)
    every_tile = num_slots * tiling.num_tiles
    searched = sampling.top_k is not None or sampling.top_p is not None
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
        # Left to itself, ptxas takes fewer registers than fit, and spills.
        maxnreg=128 if tiling.search_warps == 8 else 255,
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
    sampling,
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
    need, by_count, scale, best = need_of(
        target, draft, slots, sampling, tiles, slot, index, exists, num_tiles, MERGED
    )
    if need > 0:
        bounds = coarse_bounds(tiles, slot, num_tiles, by_count, scale, best, BOUNDS, MERGED)
        sums = search.coarse
        if FINE:
            low, high = narrow(
                search.coarse, slot, num_tiles, bounds, need, -INFINITY, best, BOUNDS, MERGED
            )
            bounds = fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS, MERGED)
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
    sampling,
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
    need, by_count, scale, best = need_of(
        target, draft, slots, sampling, tiles, slot, index, exists, num_tiles, MERGED
    )
    if need > 0:
        bounds = coarse_bounds(tiles, slot, num_tiles, by_count, scale, best, BOUNDS, MERGED)
        low, high = narrow(
            search.coarse, slot, num_tiles, bounds, need, -INFINITY, best, BOUNDS, MERGED
        )
        bounds = fine_bounds(low, high, tiles, slot, num_tiles, BOUNDS, MERGED)
        low, high = narrow(search.fine, slot, num_tiles, bounds, need, low, high, BOUNDS, MERGED)
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
def kept_kernel(target, draft, slots, sampling, tiles, num_tiles, TILE: tl.constexpr):
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
            scale, _, _ = temperature_of(sampling, index)
            x = load_any(target, draft, slots, slot, tile * TILE + tl.arange(0, TILE))
            weights = weights_of(x, best, scale)
            total = sum_weights(tl.where(x >= threshold, weights, 0.0))
        tl.store(tiles.total + out, total)
