"""Acceptance of the children of one node: by the target's mass, or by rejection."""

import triton
import triton.language as tl

from fastspec_kernels.triton.residual import draft_row_of, load_at_target_ids, residual_weights
from fastspec_kernels.triton.rows import (
    MASS_ONE,
    OUTSIDE,
    argmax_of,
    group_of,
    masses_of,
    to_mass,
    units_lost,
    weights_of_group,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    flag,
    load_logits,
)


@triton.jit
def draft_row(slots, tiles, sampling, tree, row, b, node, taken, num_tiles, MERGED: tl.constexpr):
    """Best logit of a node's draft row, factor of its weights in the residual, lowest logit."""
    best, prob, lowest = draft_row_of(slots, tiles, sampling, tree, b, node, num_tiles, MERGED)
    target_total = tl.sum(row.masses, 0).to(tl.float64)
    ratio = tl.minimum(prob * taken * target_total / MASS_ONE, 1e30).to(tl.float32)
    return best, ratio, lowest


@triton.jit
def next_child(parents, node, after, NODES: tl.constexpr):
    """The first child of a node after an index, OUTSIDE if there is none."""
    index = tl.arange(0, NODES)
    return tl.min(tl.where((parents == node) & (index > after), index, OUTSIDE), 0)


@triton.jit
def token_at(tokens, child, NODES: tl.constexpr):
    """The token of one node."""
    return tl.sum(tl.where(tl.arange(0, NODES) == child, tokens, 0), 0)


@triton.jit
def _is_repeated(tokens, parents, node, child, token, NODES: tl.constexpr):
    """Whether an earlier sibling has the same token."""
    same = (parents == node) & (tl.arange(0, NODES) < child) & (tokens == token)
    return tl.max(same.to(tl.int32), 0) != 0


@triton.jit
def by_mass(
    target,
    tiles,
    tree,
    tokens,
    parents,
    row,
    b,
    node,
    scale,
    greedy,
    num_tiles,
    TILE: tl.constexpr,
    NODES: tl.constexpr,
    MERGED: tl.constexpr,
):
    """The child in whose share of the target's mass the uniform number falls, and the rest."""
    tile = tl.arange(0, MERGED)
    at = row.slot.to(tl.int64) * num_tiles + tile
    totals = tl.load(tiles.total + at, mask=tile < num_tiles, other=0)
    best_id = argmax_of(tiles, row.slot, row.maxima, row.best, num_tiles, MERGED)
    uniform = tl.load(tree.uniform_samples + b * (tree.num_nodes + 1) + node).to(tl.float64)
    goal = uniform * tl.sum(row.masses, 0).to(tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    child = next_child(parents, node, -1, NODES)
    judging = tl.where(child < OUTSIDE, 1, 0)
    while judging != 0:
        token = token_at(tokens, child, NODES)
        known = (token >= 0) & (token < target.vocab)
        x = load_logits(target, row.offset, row.row, token, known)
        is_new = _is_repeated(tokens, parents, node, child, token, NODES) == 0
        counts = is_new & flag(x >= row.lowest) & flag(x > -INFINITY)
        weight = tl.where(counts, tl.exp2((x - row.best) * scale), 0.0)
        mass += weight.to(tl.float64) * MASS_ONE
        accepts = tl.where(greedy, token == best_id, counts & flag(goal < mass))
        if accepts:
            judging = 0
        else:
            here = tile == token // TILE
            ids = group_of(token, TILE)
            weights = weights_of_group(
                target, row.offset, row.row, ids, here, row.maxima, row.lowest, scale
            )
            # Earlier siblings are out of the sum already, a repeated token with them.
            earlier = (parents == node) & (tl.arange(0, NODES) < child)
            gone = tl.max(((ids[:, None] == tokens[None, :]) & earlier[None, :]).to(tl.int32), 1)
            weights = tl.where(gone == 0, weights, 0.0)
            totals -= tl.where(here, units_lost(weights, ids == token), 0)
            child = next_child(parents, node, child, NODES)
            judging = tl.where(child < OUTSIDE, 1, 0)
    return child, masses_of(totals, row.maxima, row.best, scale)


@triton.jit
def by_rejection(
    target,
    draft,
    slots,
    sampling,
    tiles,
    tree,
    tokens,
    parents,
    row,
    b,
    node,
    scale,
    num_tiles,
    WITHOUT_REPLACEMENT: tl.constexpr,
    TILE: tl.constexpr,
    NODES: tl.constexpr,
    MERGED: tl.constexpr,
):
    """The accepted child, the remaining target, and how much of the draft was subtracted from it.

    After any number of rejections the target is max(target - taken * draft, 0), normalised: values
    clamped to 0 stay there, so one number represents all steps.
    """
    total = tl.sum(row.masses, 0).to(tl.float64)
    rest = row.masses
    left = total  # mass of the remaining target
    taken = tl.full([], 0.0, tl.float64)
    draft_best, draft_prob, draft_lowest = draft_row_of(
        slots, tiles, sampling, tree, b, node, num_tiles, MERGED
    )
    draft_total = MASS_ONE / draft_prob
    draft_left = draft_total
    removed = tl.full([], 0, tl.int64)
    ratio = tl.full([], 0.0, tl.float32)
    child = next_child(parents, node, -1, NODES)
    judging = tl.where(child < OUTSIDE, 1, 0)
    while judging != 0:
        token = token_at(tokens, child, NODES)
        known = (token >= 0) & (token < target.vocab)
        x = load_logits(target, row.offset, row.row, token, known)
        y = load_at_target_ids(draft, tree.token_map, b, node, token, known)
        draft_weight = tl.where(y >= draft_lowest, tl.exp2((y - draft_best) * scale), 0.0)
        weight = residual_weights(
            x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio
        )
        mass = to_mass(weight)
        draft_mass = to_mass(draft_weight)
        if WITHOUT_REPLACEMENT:
            is_new = _is_repeated(tokens, parents, node, child, token, NODES) == 0
            draft_mass = tl.where(is_new, draft_mass, 0)
        uniform = tl.load(tree.uniform_samples + b * (tree.num_nodes + 1) + child)
        chance = uniform.to(tl.float64) * draft_mass.to(tl.float64) / draft_left
        if chance < mass.to(tl.float64) / left:
            judging = 0
        else:
            more = taken + left / total * (draft_total / draft_left)
            _, more_ratio, _ = draft_row(
                slots, tiles, sampling, tree, row, b, node, more, num_tiles, MERGED
            )
            sums, draft_sum = _residual_sums(
                target, draft, tree, row, b, node, draft_best, draft_lowest, scale, more_ratio,
                num_tiles, TILE, MERGED,
            )  # fmt: skip
            if tl.sum(sums, 0) > 0:
                rest = sums
                left = tl.sum(sums, 0).to(tl.float64)
                taken = more
                ratio = more_ratio
            if WITHOUT_REPLACEMENT:
                removed += draft_mass
                draft_left = (draft_sum - removed).to(tl.float64)
                draft_left = tl.where(draft_left > 0, draft_left, 1e300)
            child = next_child(parents, node, child, NODES)
            judging = tl.where(child < OUTSIDE, 1, 0)
    return child, rest, taken


@triton.jit
def _residual_sums(
    target,
    draft,
    tree,
    row,
    b,
    node,
    draft_best,
    draft_lowest,
    scale,
    ratio,
    num_tiles,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Masses [MERGED] of the residual by tile, and the mass of the draft row."""
    index = tl.arange(0, MERGED)
    sums = tl.zeros([MERGED], tl.int64)
    draft_sum = tl.zeros([TILE], tl.int64)
    for tile in range(0, num_tiles):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < target.vocab
        x = load_logits(target, row.offset, row.row, ids, inside)
        y = load_at_target_ids(draft, tree.token_map, b, node, ids, inside)
        weights = residual_weights(
            x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio
        )
        sums = tl.where(index == tile, tl.sum(to_mass(weights), 0), sums)
        weight = tl.where(y >= draft_lowest, tl.exp2((y - draft_best) * scale), 0.0)
        draft_sum += to_mass(weight)
    return sums, tl.sum(draft_sum, 0)
