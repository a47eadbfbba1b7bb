"""The sums of residuals, and the draw of a chain's extra token."""

import triton
import triton.language as tl

from fastspec_kernels.triton.draw import pick_tile, pick_token
from fastspec_kernels.triton.overlap import wait_for_previous
from fastspec_kernels.triton.residual import (
    load_at_target_ids,
    ratio_of,
    residual_weights,
    slot_of_draft,
)
from fastspec_kernels.triton.rows import (
    LN_2,
    argmax_of,
    group_of,
    log_of_mass,
    masses_of,
    merge_row,
    sum_masses,
    threshold_of,
    to_mass,
    units_lost,
    weights_of,
    weights_of_group,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    find_target,
    load_logits,
    target_slot,
    temperature_of,
)


@triton.jit
def residual_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    draft_slots,
    draft_tiles,
    chain,
    verdict,
    sums,
    num_weighed,
    num_tiles,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence, weighed step and tile: mass of the residual."""
    wait_for_previous(PDL)
    tile = tl.program_id(0) % num_tiles
    at = tl.program_id(0) // num_tiles
    b = at // num_weighed
    step = at % num_weighed
    if not BLOCK:
        step = tl.load(verdict.rejected + b)
    weight = tl.load(verdict.weight + at)
    total = tl.full([], 0, tl.int64)
    if weight > 0:
        slot = target_slot(slots, b, step)
        offset, row, _, _ = find_target(target, slots, slot)
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < target.vocab
        x = load_logits(target, offset, row, ids, inside)
        y = load_at_target_ids(draft, chain.token_map, b, step, ids, inside)
        scale, _, _ = temperature_of(sampling, b)
        best, draft_best, ratio = ratio_of(
            slots, sampling, tiles, draft_slots, draft_tiles, chain, b, step, weight, num_tiles,
            MERGED,
        )  # fmt: skip
        if tile == 0:
            tl.store(verdict.draft_best + at, draft_best)
            tl.store(verdict.ratio + at, ratio)
        lowest = threshold_of(tiles, slot)
        draft_lowest = threshold_of(draft_tiles, slot_of_draft(draft_slots, b, step))
        weights = residual_weights(x, best, lowest, y, draft_best, draft_lowest, scale, ratio)
        total = sum_masses(weights)
    tl.store(sums + at.to(tl.int64) * num_tiles + tile, total)


@triton.jit
def draw_kernel(
    target,
    draft,
    slots,
    sampling,
    tiles,
    draft_slots,
    draft_tiles,
    chain,
    verdict,
    sums,
    num_weighed,
    num_tiles,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence: the extra token, or no output if the row it needs is invalid."""
    wait_for_previous(PDL)
    b = tl.program_id(0)
    step = tl.load(verdict.position + b)
    rejected = tl.load(verdict.rejected + b)
    valid = step >= 0
    if chain.logsumexp is not None and valid & (rejected >= 0):
        scale, _, _ = temperature_of(sampling, b)
        _, valid, _, _ = merge_row(draft_tiles, b, num_tiles, scale, MERGED)
        if valid == 0:
            tl.store(verdict.accepted_len + b, -1)
            for i in range(0, step):
                tl.store(verdict.output_token_ids + b * (chain.num_draft + 1) + i, -1)
                tl.store(verdict.logprobs + b * (chain.num_draft + 1) + i, 0.0)
    if valid:
        slot = target_slot(slots, b, step)
        offset, row, _, _ = find_target(target, slots, slot)
        scale, greedy, _ = temperature_of(sampling, b)
        best, _, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
        total = tl.sum(masses, 0)
        value = best
        if greedy:
            token = argmax_of(tiles, slot, maxima, best, num_tiles, MERGED)
        else:
            lowest = threshold_of(tiles, slot)
            uniform = tl.load(chain.uniform_samples + (b + 1) * (chain.num_draft + 1) - 1)
            banned = -1
            has_residual = rejected < -1  # no
            if rejected >= 0:
                if draft.logits is None:
                    banned = tl.load(chain.token_ids + b * chain.num_draft + rejected)
                    rest = _without_token(
                        target, tiles, slot, offset, row, maxima, best, lowest, scale, banned,
                        num_tiles, TILE, MERGED,
                    )  # fmt: skip
                else:
                    at = b * num_weighed
                    if BLOCK:
                        at += rejected
                    index = tl.arange(0, MERGED)
                    here = sums + at.to(tl.int64) * num_tiles + index
                    rest = tl.load(here, mask=index < num_tiles, other=0)
                has_residual = tl.sum(rest, 0) > 0
                masses = tl.where(has_residual, rest, masses)
                banned = tl.where(has_residual, banned, -1)

            tile, share = pick_tile(masses, uniform, MERGED)
            ids = tile * TILE + tl.arange(0, TILE)
            inside = ids < target.vocab
            x = load_logits(target, offset, row, ids, inside)
            if draft.logits is not None and has_residual & (rejected >= 0):
                at = b * num_weighed
                if BLOCK:
                    at += rejected
                y = load_at_target_ids(draft, chain.token_map, b, step, ids, inside)
                draft_lowest = threshold_of(draft_tiles, slot_of_draft(draft_slots, b, step))
                rest_of_tile = residual_weights(
                    x, best, lowest, y, tl.load(verdict.draft_best + at), draft_lowest, scale,
                    tl.load(verdict.ratio + at),
                )  # fmt: skip
                weights = to_mass(rest_of_tile)
            else:
                # A tile with a mass has a token with one, by masses finer than the units of sums.
                weights = to_mass(weights_of(x, tl.max(x, 0), scale))
                weights = tl.where((x >= lowest) & (ids != banned), weights, 0)
            token = pick_token(weights, ids, share)
            value = tl.max(tl.where(ids == token, x, -INFINITY), 0)
        out = b * (chain.num_draft + 1) + step
        tl.store(verdict.output_token_ids + out, token)
        tl.store(verdict.logprobs + out, (value - best) * scale * LN_2 - log_of_mass(total))


@triton.jit
def _without_token(
    target,
    tiles,
    slot,
    offset,
    row,
    maxima,
    best,
    lowest,
    scale,
    token,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Masses [MERGED] of a target row without one token."""
    tile = tl.arange(0, MERGED)
    at = slot.to(tl.int64) * num_tiles + tile
    totals = tl.load(tiles.total + at, mask=tile < num_tiles, other=0)
    here = tile == token // TILE
    ids = group_of(token, TILE)
    weights = weights_of_group(target, offset, row, ids, here, maxima, lowest, scale)
    lost = units_lost(weights, ids == token)
    return masses_of(totals - tl.where(here, lost, 0), maxima, best, scale)
