"""sample_coupled: Gumbel-max with noise determined by (seed, position)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.rows import (
    LN_2,
    OUTSIDE,
    argmax_of,
    log_of_mass,
    merge_row,
    threshold_of,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    find_target,
    load_logits,
    temperature_of,
    to_float,
)
from fastspec_kernels.triton.statistics import independent_rows
from fastspec_kernels.triton.tiles import tiling_of

# As in csrc/common/philox.h: groups of GROUP tokens, and GROUP groups per range of ids.
LEAST_STREAM = tl.constexpr(0x67756D62)
OTHERS_STREAM = tl.constexpr(0x67756D63)
GROUP = tl.constexpr(16)
_STRETCH = 256


def sample_coupled(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """3 launches, not counting those of the filters."""
    num_rows, vocab = logits.shape
    tiling = tiling_of(vocab)
    rows = independent_rows(logits, temperature, top_k, top_p, min_p, token_bitmask)
    scores = logits.new_empty((num_rows, tiling.num_tiles), dtype=torch.float32)
    winners = logits.new_empty((num_rows, tiling.num_tiles), dtype=torch.int32)
    launch(
        race_kernel,
        num_rows * tiling.num_tiles,
        *rows,
        seed,
        position,
        scores,
        winners,
        tiling.num_tiles,
        TILE=max(tiling.tile, _STRETCH),
        MERGED=tiling.merged,
        num_warps=tiling.search_warps,
    )
    token_ids = logits.new_empty((num_rows,), dtype=torch.int32)
    logprobs = logits.new_empty((num_rows,), dtype=torch.float32)
    launch(
        winner_kernel,
        num_rows,
        *rows,
        scores,
        winners,
        token_ids,
        logprobs,
        tiling.num_tiles,
        MERGED=tiling.merged,
        num_warps=1,
    )
    return token_ids, logprobs


@triton.jit
def race_kernel(
    rows,
    slots,
    sampling,
    tiles,
    seed,
    position,
    scores,
    winners,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per row and tile: the tile's best token, if noise is needed."""
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    offset, row, index, _ = find_target(rows, slots, slot)
    scale, greedy, usable = temperature_of(sampling, index)
    best, valid, _, _ = merge_row(tiles, slot, num_tiles, scale, MERGED)
    if usable & valid & (greedy == 0):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(rows, offset, row, ids, ids < rows.vocab)
        noise = _noise(tl.load(seed + slot), tl.load(position + slot), tile * TILE, TILE)
        kept = (x > -INFINITY) & (x >= threshold_of(tiles, slot))
        score = tl.where(kept, (x - best) * scale + noise, -INFINITY)
        winner = tl.max(score, 0)
        out = slot.to(tl.int64) * num_tiles + tile
        tl.store(scores + out, winner)
        tl.store(winners + out, tl.min(tl.where(score == winner, ids, OUTSIDE), 0))


@triton.jit
def winner_kernel(
    rows,
    slots,
    sampling,
    tiles,
    scores,
    winners,
    token_ids,
    logprobs,
    num_tiles,
    MERGED: tl.constexpr,
):
    """One program per row."""
    slot = tl.program_id(0)
    offset, _, index, _ = find_target(rows, slots, slot)
    scale, greedy, usable = temperature_of(sampling, index)
    best, valid, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    token = -1
    logprob = float("nan")
    if usable & valid:
        if greedy:
            token = argmax_of(tiles, slot, maxima, best, num_tiles, MERGED)
        else:
            tile = tl.arange(0, MERGED)
            at = slot.to(tl.int64) * num_tiles + tile
            score = tl.load(scores + at, mask=tile < num_tiles, other=-INFINITY)
            ids = tl.load(winners + at, mask=tile < num_tiles, other=OUTSIDE)
            token = tl.min(tl.where(score == tl.max(score, 0), ids, OUTSIDE), 0)
        value = to_float(tl.load(rows.logits + offset + token))
        logprob = (value - best) * scale * LN_2 - log_of_mass(tl.sum(masses, 0))
    tl.store(token_ids + slot, token)
    tl.store(logprobs + slot, logprob)


@triton.jit
def _noise(seed, position, first, TILE: tl.constexpr):
    """Gumbel noise over ln 2 of the tokens from `first` on, which begins a range."""
    STRETCHES: tl.constexpr = TILE // (GROUP * GROUP)
    words = _words(seed, position, LEAST_STREAM, first // GROUP, STRETCHES * GROUP)
    words = tl.reshape(words, [STRETCHES, 1, GROUP])
    least = _minus_log(words >> 4, 28) / GROUP
    more = _minus_log(_words(seed, position, OTHERS_STREAM, first, TILE), 32)
    more = tl.reshape(more, [STRETCHES, GROUP, GROUP])
    place = tl.arange(0, GROUP)[None, :, None]
    has_least = (words % GROUP).to(tl.int32) == place
    return tl.reshape(-tl.log2(least + tl.where(has_least, 0.0, more)), [TILE])


@triton.jit
def _words(seed, position, stream, first, NUM: tl.constexpr):
    """NUM words, beginning with number `first`, a multiple of 4."""
    zero = tl.zeros([NUM // 4], tl.uint32)
    c0 = zero + position.to(tl.uint32)
    c1 = zero + (position >> 32).to(tl.uint32)
    c2 = (first // 4 + tl.arange(0, NUM // 4)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, c2, zero + stream, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [NUM])


@triton.jit
def _minus_log(word, BITS: tl.constexpr):
    """-ln((word + 0.5) / 2**BITS), accurate to rounding even close to 0."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    ONE: tl.constexpr = 2.0**-BITS
    is_low = word < HALF
    # The complement is exact, and the resulting share is at most a half.
    share = tl.where(is_low, word, HALF + (HALF - 1) - word).to(tl.float32) * ONE + 0.5 * ONE
    s = share / (2.0 - share)
    square = s * s
    y = tl.full(share.shape, 1 / 15, tl.float32)
    y = tl.fma(y, square, tl.full(share.shape, 1 / 13, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1 / 11, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1 / 9, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1 / 7, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1 / 5, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1 / 3, tl.float32))
    y = tl.fma(y, square, tl.full(share.shape, 1.0, tl.float32))
    return tl.where(is_low, -tl.log2(share) * LN_2, 2.0 * s * y)
