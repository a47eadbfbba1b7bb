"""Statistics of the tiles of all rows of a call: the first launch of every op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.filters import search_thresholds
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.overlap import wait_for_previous
from fastspec_kernels.triton.rows import OUTSIDE, Tiles, sum_weights, weights_of
from fastspec_kernels.triton.slots import (
    INFINITY,
    NO_ROWS,
    Params,
    Rows,
    Slots,
    load_tile,
    row_exists,
    temperature_of,
)
from fastspec_kernels.triton.tiles import next_power_of_2, tiling_of

MOST_ELEMENTS = 2**20  # of a block in Triton
MOST_STEPS = 65535  # per sequence, rows of both models; the limit of a grid dimension


def target_rows(logits: Tensor, token_bitmask: Tensor | None) -> Rows:
    """Describe rows [T, V] of the target."""
    bitmask_stride = 0 if token_bitmask is None else token_bitmask.stride(0)
    return Rows(logits, 0, logits.stride(0), logits.shape[1], token_bitmask, bitmask_stride)


def draft_rows(logits: Tensor | None) -> Rows:
    """Describe rows [B, K, draft V] of the drafter."""
    if logits is None:
        return NO_ROWS
    outer_stride, stride, _ = logits.stride()
    return Rows(logits, outer_stride, stride, logits.shape[2], None, 0)


def independent_rows(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Rows, Slots, Params, Tiles]:
    """Describe rows [R, V] with a slot and parameters each, and compute their statistics."""
    rows, slots = target_rows(logits, token_bitmask), Slots(1, 0, None, None)
    sampling = Params(temperature, top_k, top_p, min_p)
    return rows, slots, sampling, tiles_of(rows, NO_ROWS, slots, sampling, len(logits))


def tiles_of(target: Rows, draft: Rows, slots: Slots, sampling: Params, num_slots: int) -> Tiles:
    """Compute statistics of each slot's kept logits; 1 launch, with filters see `filters`."""
    tiling = tiling_of(target.vocab)
    filtered = any(value is not None for value in sampling[1:])
    new = target.logits.new_empty
    shape = (num_slots, tiling.num_tiles)
    tiles = Tiles(
        maximum=new(shape, dtype=torch.float32),
        total=new(shape, dtype=torch.int64),
        argmax=None if sampling.temperature is None else new(shape, dtype=torch.int32),
        minimum=new(shape, dtype=torch.float32) if filtered else None,
        threshold=new((num_slots,), dtype=torch.float32) if filtered else None,
    )
    per_sequence = slots.steps + slots.draft_steps
    if per_sequence > MOST_STEPS:
        raise ValueError(f"draft tokens: triton supports up to {MOST_STEPS} rows per sequence")
    if next_power_of_2(slots.steps) * tiling.merged > MOST_ELEMENTS:
        most = MOST_ELEMENTS // tiling.merged - 1
        raise ValueError(f"draft tokens: triton supports up to {most} with {target.vocab} logits")
    launch(
        tile_statistics_kernel,
        (num_slots // per_sequence, tiling.num_tiles, per_sequence),
        target,
        draft,
        slots,
        sampling,
        tiles,
        tiling.num_tiles,
        TILE=tiling.tile,
        num_warps=tiling.statistics_warps,
    )
    if filtered:
        search_thresholds(target, draft, slots, sampling, tiles, num_slots)
    return tiles


@triton.jit
def tile_statistics_kernel(
    target, draft, slots, sampling, tiles, num_tiles, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Program (sequence, tile, step): maximum, sum of weights, and extra values of some rows."""
    wait_for_previous(PDL)
    index = tl.program_id(0)
    tile = tl.program_id(1)
    step = tl.program_id(2)
    slot = index * (slots.steps + slots.draft_steps) + step
    out = slot.to(tl.int64) * num_tiles + tile
    if row_exists(target, draft, slots, index, step):
        x = load_tile(target, draft, slots, index, step, tile, TILE)
        scale, greedy, _ = temperature_of(sampling, index)
        best = _best_of(x, TILE)
        if tiles.argmax is not None and greedy:
            ids = tile * TILE + tl.arange(0, TILE)
            tl.store(tiles.argmax + out, tl.min(tl.where(x == best, ids, OUTSIDE), 0))
        if tiles.minimum is not None:
            # Infinities become NaN, which a minimum ignores unless there is nothing else.
            lowest = tl.min(tl.fma(x, 0.0, x), 0)
            tl.store(tiles.minimum + out, tl.where(lowest == lowest, lowest, INFINITY))
        total = tl.full([], 0, tl.int64)
        if best < INFINITY:
            total = sum_weights(weights_of(x, best, scale))
        tl.store(tiles.maximum + out, tl.where(best < INFINITY, best, float("nan")))
        tl.store(tiles.total + out, total)
    else:
        tl.store(tiles.maximum + out, -INFINITY)
        tl.store(tiles.total + out, 0)


@triton.jit
def _best_of(x, TILE: tl.constexpr):
    """The largest of a tile; +inf also if one is NaN.

    Reductions drop NaN, but maxima of two blocks can keep it: after maxima of the tile's quarters,
    only a quarter of the elements needs checking.
    """
    quarters = tl.reshape(tl.trans(tl.reshape(x, [4, TILE // 4])), [TILE // 4, 2, 2])
    a, b = tl.split(quarters)
    a, b = tl.split(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    best = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(tl.where(best < INFINITY, best, INFINITY), 0)
