"""Statistics of the tiles of all rows of a call: the first launch of every op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.filters import search_thresholds
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.rows import OUTSIDE, Tiles, tile_weights
from fastspec_kernels.triton.slots import (
    INFINITY,
    NO_ROWS,
    Params,
    Rows,
    Slots,
    load_any,
    locate_params,
    temperature_of,
)
from fastspec_kernels.triton.tiles import tiling_of


def target_rows(logits: Tensor, token_bitmask: Tensor | None) -> Rows:
    """Rows [T, V] of the target."""
    bitmask_stride = 0 if token_bitmask is None else token_bitmask.stride(0)
    return Rows(logits, 0, logits.stride(0), logits.shape[1], token_bitmask, bitmask_stride)


def draft_rows(logits: Tensor | None) -> Rows:
    """Rows [B, K, draft V] of the drafter."""
    if logits is None:
        return NO_ROWS
    outer_stride, stride, _ = logits.stride()
    return Rows(logits, outer_stride, stride, logits.shape[2], None, 0)


def row_slots() -> Slots:
    """One slot for each row, which has its own parameters."""
    return Slots(1, 0, None, None)


def tiles_of(target: Rows, draft: Rows, slots: Slots, sampling: Params, num_slots: int) -> Tiles:
    """Statistics of the kept logits of every slot; 1 launch without filters, else see `filters`."""
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
    launch(
        tile_statistics_kernel,
        num_slots * tiling.num_tiles,
        target,
        draft,
        slots,
        sampling,
        tiles,
        tiling.num_tiles,
        TILE=tiling.tile,
        num_warps=tiling.tile_warps,
    )
    if filtered:
        search_thresholds(target, draft, slots, sampling, tiles, num_slots)
    return tiles


@triton.jit
def tile_statistics_kernel(target, draft, slots, sampling, tiles, num_tiles, TILE: tl.constexpr):
    """One program per slot and tile: maximum, sum of weights, and what some rows need besides."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    out = slot.to(tl.int64) * num_tiles + tile
    index, exists = locate_params(target, draft, slots, slot)
    if exists:
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_any(target, draft, slots, slot, ids)
        scale, greedy, _ = temperature_of(sampling, index)
        usable = x < INFINITY  # neither NaN nor +inf
        x = tl.where(usable, x, -INFINITY)
        spoilt = tl.min(usable.to(tl.int32), 0) == 0
        best = tl.max(x, 0)
        tl.store(tiles.maximum + out, tl.where(spoilt, float("nan"), best))
        tl.store(tiles.total + out, tl.sum(tile_weights(x, best, scale), 0))
        if tiles.argmax is not None and greedy:
            tl.store(tiles.argmax + out, tl.min(tl.where(x == best, ids, OUTSIDE), 0))
        if tiles.minimum is not None:
            lowest = tl.min(tl.where(x > -INFINITY, x, INFINITY), 0)
            tl.store(tiles.minimum + out, lowest)
    else:
        tl.store(tiles.maximum + out, -INFINITY)
        tl.store(tiles.total + out, 0)
