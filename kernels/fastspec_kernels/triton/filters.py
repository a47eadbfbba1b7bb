"""Thresholds of the filters: a sample brackets the threshold, then bisection among candidates.

Rows are read once for the candidates, and once more before if the sample leaves too many of them,
as with top-p among many logits of similar weight; then sums above bounds narrow the bracket. A
bracket that turns out not to contain the threshold only costs time: the row is searched without it.

Launches of the whole search: 1 for only min-p, 1 for rows of one tile, otherwise 4; 1 more sums
what is kept. Only the last step's sums decide, and they are of integers, so order is irrelevant.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastspec_kernels.triton.bounds import (
    bracket_by_count,
    bracket_by_mass,
    fine_bounds,
    narrow,
    need_of,
    range_of,
    sampled_ids,
)
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
    vocab_of,
)
from fastspec_kernels.triton.threshold import threshold_kernel
from fastspec_kernels.triton.tiles import Tiling, next_power_of_2, tiling_of

NUM_BOUNDS = 16
TILES_PER_CUT = 4
CHUNK = 256  # elements that a program compares with all bounds at once
CAPACITY = 4096  # candidates of a row
FEW = 512  # candidates of most rows: a smaller block processes them faster
SAMPLE = 4096  # sampled logits that bracket a row's threshold; at most the largest tile
EXPECTED = CAPACITY * 5 // 8  # estimated candidates above which a bracket is narrowed
# Low bits that are zero in the f32 of every value, which bisection skips.
ZEROS = {torch.bfloat16: 16, torch.float16: 13}
# Per thread. By default ptxas uses fewer than fit, and spills, or more than are useful.
MOST_REGISTERS = 128
# Bits of a plan; a slot without a search has none.
SEARCHED = tl.constexpr(1)
WIDE = tl.constexpr(2)
BY_COUNT = tl.constexpr(4)


class Search(NamedTuple):
    """Intermediate results passed between the launches of a search."""

    plan: Any  # i32 [slots], the work that bracket_kernel found
    sums: Any  # f32 [slots, parts, NUM_BOUNDS] for wide slots, sums above the bounds
    need: Any  # f32 [slots], the count or mass that the logits above the threshold fall short of
    candidates: Any  # f32 [slots, CAPACITY]
    count: Any  # i32 [slots], candidates found, including those beyond the capacity
    beyond: Any  # i64 [slots], mass above all candidates
    sampled: Any  # f32 [slots, 2], low and high from the sample
    bracket: Any  # f32 [slots, 2], the candidates are in (low, high]; no high with top-k


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
    zeros = min(
        ZEROS.get(rows.logits.dtype, 0) for rows in (target, draft) if rows.logits is not None
    )
    searched = sampling.top_k is not None or sampling.top_p is not None
    search = None
    if searched and tiling.num_tiles > 1:
        search = _new_search(target, num_slots, tiling)
        launch(
            bracket_kernel,
            num_slots,
            *args,
            search,
            tiling.num_tiles,
            SAMPLE=SAMPLE,
            EXPECTED=EXPECTED,
            ZEROS=zeros,
            MERGED=tiling.merged,
            num_warps=8,
            maxnreg=MOST_REGISTERS,
        )
        parts = _parts_of(tiling)
        cuts = {"BOUNDS": NUM_BOUNDS, "MERGED": tiling.merged}
        launch(
            cut_kernel,
            num_slots * parts,
            *args,
            search,
            tiling.num_tiles,
            parts,
            TILES=TILES_PER_CUT,
            TILE=tiling.tile,
            CHUNK=CHUNK,
            **cuts,
            num_warps=4,
        )
        launch(
            gather_kernel,
            every_tile,
            *args,
            search,
            tiling.num_tiles,
            parts,
            TILE=tiling.tile,
            GROUP=16 // target.logits.element_size(),  # elements per load of a thread
            CHUNK=4 * CHUNK,
            CAPACITY=CAPACITY,
            PARTS=next_power_of_2(parts),
            **cuts,
            num_warps=tiling.tile_warps,
            maxnreg=MOST_REGISTERS,  # four programs fit a multiprocessor
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
        FEW=FEW,
        ZEROS=zeros,
        MERGED=tiling.merged,
        num_warps=tiling.search_warps,
        maxnreg=MOST_REGISTERS if tiling.search_warps == 8 else 255,
    )
    launch(
        kept_kernel,
        every_tile,
        *args,
        tiling.num_tiles,
        TILE=tiling.tile,
        num_warps=tiling.statistics_warps,
    )


def _parts_of(tiling: Tiling) -> int:
    """Programs of cut_kernel per row: few, because for most rows they do nothing."""
    return -(-tiling.num_tiles // TILES_PER_CUT)


def _new_search(target: Rows, num_slots: int, tiling: Tiling) -> Search:
    new = target.logits.new_empty
    return Search(
        plan=new((num_slots,), dtype=torch.int32),
        sums=new((num_slots, _parts_of(tiling), NUM_BOUNDS), dtype=torch.float32),
        need=new((num_slots,), dtype=torch.float32),
        candidates=new((num_slots, CAPACITY), dtype=torch.float32),
        count=new((num_slots,), dtype=torch.int32),
        beyond=new((num_slots,), dtype=torch.int64),
        sampled=new((num_slots, 2), dtype=torch.float32),
        bracket=new((num_slots, 2), dtype=torch.float32),
    )


@triton.jit
def bracket_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    search,
    num_tiles,
    SAMPLE: tl.constexpr,
    EXPECTED: tl.constexpr,
    ZEROS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot: what is searched for, and likely bounds of the threshold."""
    slot = tl.program_id(0)
    index, exists = locate_params(target, draft, slots, slot)
    need, by_count, rest, scale, best = need_of(
        target, draft, slots, sampling, tiles, slot, index, exists, num_tiles, MERGED
    )
    plan = 0
    if need > 0:
        vocab = vocab_of(target, draft, slots, slot)
        x = load_any(target, draft, slots, slot, sampled_ids(vocab, SAMPLE))
        share = tl.full([], SAMPLE, tl.float32) / tl.maximum(vocab, SAMPLE)
        limit = EXPECTED * share
        if by_count:
            low, high, number = bracket_by_count(x, need, share, best, limit, ZEROS)
            plan = SEARCHED + BY_COUNT
        else:
            low, high, number = bracket_by_mass(x, rest, share, scale, best, limit, ZEROS)
            plan = SEARCHED + 0
        if number > limit:
            plan += WIDE
        tl.store(search.sampled + slot * 2, low)
        tl.store(search.sampled + slot * 2 + 1, high)
        tl.store(search.bracket + slot * 2, low)
        tl.store(search.bracket + slot * 2 + 1, high)
        tl.store(search.need + slot, need)
        tl.store(search.count + slot, 0)
        tl.store(search.beyond + slot, 0)
    tl.store(search.plan + slot, plan)


@triton.jit
def cut_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    search,
    num_tiles,
    parts,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUNDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot and TILES tiles, idle unless wide: their count or mass above bounds."""
    slot = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    plan = tl.load(search.plan + slot)
    if (plan & WIDE) != 0:
        by_count = (plan & BY_COUNT) != 0
        index, _ = locate_params(target, draft, slots, slot)
        scale, _, _ = temperature_of(sampling, index)
        best, lowest = range_of(tiles, slot, num_tiles, MERGED)
        low = tl.load(search.sampled + slot * 2)
        high = tl.load(search.sampled + slot * 2 + 1)
        bounds = fine_bounds(low, high, lowest, BOUNDS)
        lowest_bound = tl.min(bounds, 0)
        sum_above = tl.zeros([BOUNDS, CHUNK], tl.float32)
        for tile in range(part * TILES, tl.minimum(part * TILES + TILES, num_tiles)):
            maximum = tl.load(tiles.maximum + slot.to(tl.int64) * num_tiles + tile)
            if maximum > lowest_bound:
                for start in range(0, TILE, CHUNK):
                    ids = tile * TILE + start + tl.arange(0, CHUNK)
                    x = load_any(target, draft, slots, slot, ids)
                    worth = tl.where(by_count, 1.0, tl.exp2((x - best) * scale))
                    above = x[None, :] > bounds[:, None]
                    sum_above += tl.where(above, worth[None, :], 0.0)
        out = (slot.to(tl.int64) * parts + part) * BOUNDS + tl.arange(0, BOUNDS)
        tl.store(search.sums + out, tl.sum(sum_above, 1))


@triton.jit
def gather_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    search,
    num_tiles,
    parts,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BOUNDS: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per slot and tile: logits near the threshold, mass of those above them."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    plan = tl.load(search.plan + slot)
    maximum = tl.load(tiles.maximum + slot.to(tl.int64) * num_tiles + tile)
    low = tl.load(search.sampled + slot * 2)
    high = tl.load(search.sampled + slot * 2 + 1)
    if plan != 0:
        if (plan & WIDE) != 0:
            _, lowest = range_of(tiles, slot, num_tiles, MERGED)
            bounds = fine_bounds(low, high, lowest, BOUNDS)
            need = tl.load(search.need + slot)
            low, high = narrow(search.sums, slot, parts, bounds, need, low, high, BOUNDS, PARTS)
            if tile == 0:
                tl.store(search.bracket + slot * 2, low)
                tl.store(search.bracket + slot * 2 + 1, high)
        # Top-p may continue among all that top-k keeps.
        high = tl.where((plan & BY_COUNT) != 0, INFINITY, high)
        if maximum > low:
            # One thread loads and processes a group; threads only share sums of groups.
            groups = tl.arange(0, TILE // GROUP)[:, None] * GROUP
            ids = tile * TILE + groups + tl.arange(0, GROUP)[None, :]
            x = load_any(target, draft, slots, slot, ids)
            number = tl.sum(((x > low) & (x <= high)).to(tl.int32), 1)
            total = tl.sum(number, 0)
            start = tl.atomic_add(search.count + slot, total, sem="relaxed")
            if start + total <= CAPACITY:  # else the candidates are unusable
                out = search.candidates + slot.to(tl.int64) * CAPACITY + start
                _store_between(x, low, high, out, tl.cumsum(number, 0) - number)
            if maximum > high:
                index, _ = locate_params(target, draft, slots, slot)
                scale, _, _ = temperature_of(sampling, index)
                best, _ = range_of(tiles, slot, num_tiles, MERGED)
                beyond = _mass_above(
                    target, draft, slots, slot, tile, high, best, scale, TILE, CHUNK
                )
                tl.atomic_add(search.beyond + slot, beyond, sem="relaxed")


@triton.jit
def _mass_above(
    target, draft, slots, slot, tile, bound, best, scale, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """Mass of the logits of a tile above a bound, read once more, which few rows need."""
    mass = tl.zeros([CHUNK], tl.int64)
    for start in range(0, TILE, CHUNK):
        x = load_any(target, draft, slots, slot, tile * TILE + start + tl.arange(0, CHUNK))
        mass += tl.where(x > bound, to_mass(tl.exp2((x - best) * scale)), 0)
    return tl.sum(mass, 0)


@triton.jit
def _store_between(x, low, high, out, place):
    """Store those of each row of x [R, W] that are in (low, high] from the row's place [R] on.

    Columns are stored separately, in their own order. Unlike one store of all of x, this moves
    nothing between threads.
    """
    if x.shape[1] == 1:
        found = tl.reshape((x > low) & (x <= high), place.shape)
        tl.store(out + place, tl.reshape(x, place.shape), mask=found)
        place += found.to(tl.int32)
    else:
        left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        place = _store_between(left, low, high, out, place)
        place = _store_between(right, low, high, out, place)
    return place


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
