"""Ops on rows: statistics of the tiles, then one program per row or tile that uses them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.draw import pick_tile, pick_token
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.overlap import wait_for_previous
from fastspec_kernels.triton.rows import (
    LN_2,
    MASS_ONE,
    argmax_of,
    log_of_mass,
    merge_row,
    threshold_of,
    tile_weights,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    find_target,
    load_logits,
    temperature_of,
)
from fastspec_kernels.triton.statistics import independent_rows
from fastspec_kernels.triton.tiles import tiling_of


def row_stats(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """2 launches, those of the filters not counted."""
    num_rows, vocab = logits.shape
    tiling = tiling_of(vocab)
    rows = independent_rows(logits, temperature, top_k, top_p, min_p, token_bitmask)
    logsumexp = logits.new_empty((num_rows,), dtype=torch.float32)
    threshold = torch.empty_like(logsumexp)
    launch(
        row_stats_kernel,
        num_rows,
        *rows[2:],
        logsumexp,
        threshold,
        tiling.num_tiles,
        MERGED=tiling.merged,
        num_warps=1,
    )
    return logsumexp, threshold


def logits_to_probs(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> Tensor:
    """2 launches, those of the filters not counted."""
    num_rows, vocab = logits.shape
    tiling = tiling_of(vocab)
    rows = independent_rows(logits, temperature, top_k, top_p, min_p, token_bitmask)
    probs = logits.new_empty((num_rows, vocab), dtype=torch.float32)
    launch(
        probs_kernel,
        num_rows * tiling.num_tiles,
        *rows,
        probs,
        tiling.num_tiles,
        TILE=tiling.tile,
        MERGED=tiling.merged,
        num_warps=tiling.tile_warps,
    )
    return probs


def sample(
    logits: Tensor,
    uniform_samples: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """2 launches, those of the filters not counted."""
    num_rows, vocab = logits.shape
    tiling = tiling_of(vocab)
    rows = independent_rows(logits, temperature, top_k, top_p, min_p, token_bitmask)
    token_ids = logits.new_empty((num_rows,), dtype=torch.int32)
    logprobs = logits.new_empty((num_rows,), dtype=torch.float32)
    launch(
        sample_kernel,
        num_rows,
        *rows,
        uniform_samples,
        token_ids,
        logprobs,
        tiling.num_tiles,
        TILE=tiling.tile,
        MERGED=tiling.merged,
        num_warps=tiling.search_warps,
    )
    return token_ids, logprobs


@triton.jit
def row_stats_kernel(
    sampling, tiles, logsumexp, threshold, num_tiles, MERGED: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    scale, greedy, usable = temperature_of(sampling, row)
    best, valid, _, masses = merge_row(tiles, row, num_tiles, scale, MERGED)
    temperature = 1.0
    if sampling.temperature is not None:
        temperature = tl.where(greedy, 1.0, tl.load(sampling.temperature + row))
    usable = usable & valid
    total = best / temperature + log_of_mass(tl.sum(masses, 0))
    lowest = tl.where(greedy, best, threshold_of(tiles, row))
    tl.store(logsumexp + row, tl.where(usable, total, float("nan")))
    tl.store(threshold + row, tl.where(usable, lowest, float("nan")))


@triton.jit
def probs_kernel(
    rows,
    slots,
    sampling,
    tiles,
    probs,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per row and tile."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < rows.vocab
    offset, row, index, _ = find_target(rows, slots, slot)
    scale, greedy, usable = temperature_of(sampling, index)
    best, valid, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    out = probs + row * rows.vocab + ids
    if usable & valid:
        x = load_logits(rows, offset, row, ids, inside)
        weights = tl.exp2((x - best) * scale) / (tl.sum(masses, 0).to(tl.float64) / MASS_ONE).to(
            tl.float32
        )
        weights = tl.where(x >= threshold_of(tiles, slot), weights, 0.0)
        if greedy:
            token = argmax_of(tiles, slot, maxima, best, num_tiles, MERGED)
            weights = tl.where(ids == token, 1.0, 0.0)
        tl.store(out, weights, mask=inside)
    else:
        tl.store(out, tl.full([TILE], float("nan"), tl.float32), mask=inside)


@triton.jit
def sample_kernel(
    rows,
    slots,
    sampling,
    tiles,
    uniform_samples,
    token_ids,
    logprobs,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    wait_for_previous(PDL)
    slot = tl.program_id(0)
    offset, row, index, _ = find_target(rows, slots, slot)
    scale, greedy, usable = temperature_of(sampling, index)
    best, valid, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    token = -1
    logprob = float("nan")
    if usable & valid:
        if greedy:
            token = argmax_of(tiles, slot, maxima, best, num_tiles, MERGED)
            value = best
        else:
            tile, share = pick_tile(masses, tl.load(uniform_samples + slot), MERGED)
            ids = tile * TILE + tl.arange(0, TILE)
            x = load_logits(rows, offset, row, ids, ids < rows.vocab)
            weights = tile_weights(x, tl.max(x, 0), scale)
            weights = tl.where(x >= threshold_of(tiles, slot), weights, 0)
            token = pick_token(weights, ids, share)
            value = tl.max(tl.where(ids == token, x, -INFINITY), 0)
        logprob = (value - best) * scale * LN_2 - log_of_mass(tl.sum(masses, 0))
    tl.store(token_ids + slot, token)
    tl.store(logprobs + slot, logprob)
