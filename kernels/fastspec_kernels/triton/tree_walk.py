"""The walk down one tree: children judged in turn, then the draw of the extra token."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec_kernels.triton.draw import pick_tile, pick_token
from fastspec_kernels.triton.residual import draft_row_of, load_at_target_ids, residual_masses
from fastspec_kernels.triton.rows import (
    LN_2,
    MASS_ONE,
    OUTSIDE,
    argmax_of,
    log_of_mass,
    masses_of,
    merge_row,
    threshold_of,
    tile_weights,
    to_mass,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    find_target,
    flag,
    load_logits,
    temperature_of,
)


class Tree(NamedTuple):
    """The nodes, and what belongs to them."""

    token_ids: Any  # i32 [B, N]
    parents: Any  # i32 [B, N]
    uniform_samples: Any  # f32 [B, N+1]
    logsumexp: Any  # None, as draft rows are read whole
    token_map: Any  # i32 [V] or None
    num_nodes: Any  # N


class Walked(NamedTuple):
    """The outputs."""

    path: Any  # i32 [B, N]
    output_token_ids: Any  # i32 [B, N]
    accepted_len: Any  # i32 [B]
    logprobs: Any  # f32 [B, N]


class Row(NamedTuple):
    """The target row of a node."""

    offset: Any
    row: Any
    slot: Any
    best: Any
    lowest: Any
    maxima: Any  # f32 [MERGED]
    masses: Any  # i64 [MERGED]


@triton.jit
def walk_kernel(
    target,
    draft,
    slots,
    params,
    tiles,
    tree,
    walked,
    num_tiles,
    WITHOUT_REPLACEMENT: tl.constexpr,
    TILE: tl.constexpr,
    NODES: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program per sequence."""
    b = tl.program_id(0)
    index = tl.arange(0, NODES)
    tokens, parents, count = _nodes_of(slots, target, tree, b, NODES)
    scale, greedy, usable = temperature_of(params, b)
    path = tl.full([NODES], -1, tl.int32)
    output = tl.full([NODES], -1, tl.int32)
    logprobs = tl.zeros([NODES], tl.float32)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    going = tl.where(count > 0, 1, 0)
    valid = tl.where(usable, 1, 0)
    rest = tl.zeros([MERGED], tl.int64)
    taken = tl.full([], 0.0, tl.float64)
    while going != 0:
        row, row_valid = _row_of(target, slots, tiles, b, node, scale, num_tiles, MERGED)
        valid = tl.where(row_valid, valid, 0)
        if draft is not None:
            draft_valid = _draft_valid(slots, tiles, b, node, scale, num_tiles, MERGED)
            has_child = tl.max((parents == node).to(tl.int32), 0) != 0
            valid = tl.where(draft_valid | (has_child == 0) | greedy, valid, 0)
        child = tl.full([], OUTSIDE, tl.int32)
        if valid != 0:
            if draft is None or greedy:
                child, rest = _by_mass(
                    target, tiles, tree, tokens, parents, row, b, node, scale, greedy, num_tiles,
                    TILE, NODES, MERGED,
                )  # fmt: skip
            else:
                child, rest, taken = _by_rejection(
                    target, draft, slots, params, tiles, tree, tokens, parents, row, b, node, scale,
                    num_tiles, WITHOUT_REPLACEMENT, TILE, NODES, MERGED,
                )  # fmt: skip
        going = tl.where(child < OUTSIDE, 1, 0)
        if going != 0:
            token = tl.load(tree.token_ids + b * tree.num_nodes + child)
            x = load_logits(target, row.offset, row.row, token, token < target.vocab)
            logprob = (x - row.best) * scale * LN_2 - log_of_mass(tl.sum(row.masses, 0))
            path = tl.where(index == depth, child, path)
            output = tl.where(index == depth, token, output)
            logprobs = tl.where(index == depth, logprob, logprobs)
            node = child
            depth += 1

    if (valid != 0) & (count > 0):
        row, _ = _row_of(target, slots, tiles, b, node, scale, num_tiles, MERGED)
        value = row.best
        if greedy:
            token = argmax_of(tiles, row.slot, row.maxima, row.best, num_tiles, MERGED)
        else:
            uniform = tl.load(tree.uniform_samples + (b + 1) * (tree.num_nodes + 1) - 1)
            has_rest = tl.sum(rest, 0) > 0
            tile, share = pick_tile(tl.where(has_rest, rest, row.masses), uniform, MERGED)
            ids = tile * TILE + tl.arange(0, TILE)
            x = load_logits(target, row.offset, row.row, ids, ids < target.vocab)
            weights = tile_weights(x, tl.max(x, 0), scale)
            weights = tl.where(x >= row.lowest, weights, 0)
            if has_rest:
                if draft is None:
                    child = _next_child(parents, node, -1, NODES)
                    while child < OUTSIDE:
                        weights = tl.where(ids == _token_at(tokens, child, NODES), 0, weights)
                        child = _next_child(parents, node, child, NODES)
                elif taken > 0:
                    draft_best, ratio, draft_lowest = _draft_row(
                        slots, tiles, params, tree, row, b, node, taken, num_tiles, MERGED
                    )
                    y = load_at_target_ids(draft, tree.token_map, b, node, ids, ids < target.vocab)
                    weights = residual_masses(
                        x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio
                    )
            token = pick_token(weights, ids, share)
            value = tl.max(tl.where(ids == token, x, -INFINITY), 0)
        logprob = (value - row.best) * scale * LN_2 - log_of_mass(tl.sum(row.masses, 0))
        output = tl.where(index == depth, token, output)
        logprobs = tl.where(index == depth, logprob, logprobs)
    else:
        path = tl.full([NODES], -1, tl.int32)
        output = tl.full([NODES], -1, tl.int32)
        logprobs = tl.zeros([NODES], tl.float32)
        depth = tl.where(count > 0, -1, 0)
    out = b * tree.num_nodes + index
    inside = index < tree.num_nodes
    tl.store(walked.path + out, path, mask=inside)
    tl.store(walked.output_token_ids + out, output, mask=inside)
    tl.store(walked.logprobs + out, logprobs, mask=inside)
    tl.store(walked.accepted_len + b, depth)


@triton.jit
def _nodes_of(slots, target, tree, b, NODES: tl.constexpr):
    """Tokens and parents [NODES] of a tree, parent -1 of what is no child; number of rows."""
    index = tl.arange(0, NODES)
    first = tl.load(slots.cu_rows + b)
    count = tl.minimum(tl.load(slots.cu_rows + b + 1), target.num_rows) - first
    count = tl.where(first >= 0, count, 0)
    there = (index < tree.num_nodes) & (index < count)
    at = b.to(tl.int64) * tree.num_nodes + index
    tokens = tl.load(tree.token_ids + at, mask=there, other=-1)
    parents = tl.load(tree.parents + at, mask=there, other=-1)
    return tokens, tl.where((parents >= 0) & (parents < index), parents, -1), count


@triton.jit
def _row_of(target, slots, tiles, b, node, scale, num_tiles, MERGED: tl.constexpr):
    """The target row of a node, and whether it is valid."""
    slot = b * slots.steps + node
    offset, row, _, _ = find_target(target, slots, slot)
    best, valid, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    return Row(offset, row, slot, best, threshold_of(tiles, slot), maxima, masses), valid


@triton.jit
def _draft_valid(slots, tiles, b, node, scale, num_tiles, MERGED: tl.constexpr):
    slot = slots.num_target + b * slots.draft_steps + node
    _, valid, _, _ = merge_row(tiles, slot, num_tiles, scale, MERGED)
    return valid


@triton.jit
def _draft_row(slots, tiles, params, tree, row, b, node, taken, num_tiles, MERGED: tl.constexpr):
    """Best logit of a node's draft row, factor of its weights in the residual, lowest logit."""
    best, prob, lowest = draft_row_of(slots, tiles, params, tree, b, node, num_tiles, MERGED)
    target_total = tl.sum(row.masses, 0).to(tl.float64)
    ratio = tl.minimum(prob * taken * target_total / MASS_ONE, 1e30).to(tl.float32)
    return best, ratio, lowest


@triton.jit
def _next_child(parents, node, after, NODES: tl.constexpr):
    index = tl.arange(0, NODES)
    return tl.min(tl.where((parents == node) & (index > after), index, OUTSIDE), 0)


@triton.jit
def _token_at(tokens, child, NODES: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, NODES) == child, tokens, 0), 0)


@triton.jit
def _is_repeated(tokens, parents, node, child, token, NODES: tl.constexpr):
    """Whether an earlier sibling has the same token."""
    same = (parents == node) & (tl.arange(0, NODES) < child) & (tokens == token)
    return tl.max(same.to(tl.int32), 0) != 0


@triton.jit
def _by_mass(
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
    """The child whose share of the target's mass the uniform number falls in, and what is left."""
    tile = tl.arange(0, MERGED)
    at = row.slot.to(tl.int64) * num_tiles + tile
    totals = tl.load(tiles.total + at, mask=tile < num_tiles, other=0)
    best_id = argmax_of(tiles, row.slot, row.maxima, row.best, num_tiles, MERGED)
    uniform = tl.load(tree.uniform_samples + b * (tree.num_nodes + 1) + node).to(tl.float64)
    goal = uniform * tl.sum(row.masses, 0).to(tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    child = _next_child(parents, node, -1, NODES)
    judging = tl.where(child < OUTSIDE, 1, 0)
    while judging != 0:
        token = _token_at(tokens, child, NODES)
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
            hit = (tile == token // TILE) & counts
            gone = tile_weights(tl.where(hit, x, row.maxima), row.maxima, scale)
            totals -= tl.where(hit, gone, 0)
            child = _next_child(parents, node, child, NODES)
            judging = tl.where(child < OUTSIDE, 1, 0)
    return child, masses_of(totals, row.maxima, row.best, scale)


@triton.jit
def _by_rejection(
    target,
    draft,
    slots,
    params,
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
    """The accepted child, what is left of the target, and how much of the draft was taken off it.

    After any number of rejections the target is max(target - taken * draft, 0), normalised: what
    is cut off at 0 stays there, so that one number stands for all steps.
    """
    total = tl.sum(row.masses, 0).to(tl.float64)
    rest = row.masses
    left = total  # mass of what is left of the target
    taken = tl.full([], 0.0, tl.float64)
    draft_best, draft_prob, draft_lowest = draft_row_of(
        slots, tiles, params, tree, b, node, num_tiles, MERGED
    )
    draft_total = MASS_ONE / draft_prob
    draft_left = draft_total
    removed = tl.full([], 0, tl.int64)
    ratio = tl.full([], 0.0, tl.float32)
    child = _next_child(parents, node, -1, NODES)
    judging = tl.where(child < OUTSIDE, 1, 0)
    while judging != 0:
        token = _token_at(tokens, child, NODES)
        known = (token >= 0) & (token < target.vocab)
        x = load_logits(target, row.offset, row.row, token, known)
        y = load_at_target_ids(draft, tree.token_map, b, node, token, known)
        draft_weight = tl.where(y >= draft_lowest, tl.exp2((y - draft_best) * scale), 0.0)
        mass = residual_masses(x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio)
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
            _, more_ratio, _ = _draft_row(
                slots, tiles, params, tree, row, b, node, more, num_tiles, MERGED
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
            child = _next_child(parents, node, child, NODES)
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
        masses = residual_masses(x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio)
        sums = tl.where(index == tile, tl.sum(masses, 0), sums)
        weight = tl.where(y >= draft_lowest, tl.exp2((y - draft_best) * scale), 0.0)
        draft_sum += to_mass(weight)
    return sums, tl.sum(draft_sum, 0)
