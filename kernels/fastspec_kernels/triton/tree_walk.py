"""The walk down one tree: children are verified in turn, then the extra token is drawn."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec_kernels.triton.draw import pick_tile, pick_token
from fastspec_kernels.triton.residual import load_at_target_ids, residual_weights
from fastspec_kernels.triton.rows import (
    LN_2,
    OUTSIDE,
    argmax_of,
    log_of_mass,
    merge_row,
    threshold_of,
    to_mass,
    weights_of,
)
from fastspec_kernels.triton.slots import (
    INFINITY,
    draft_slot,
    find_target,
    load_logits,
    target_slot,
    temperature_of,
)
from fastspec_kernels.triton.tree_rules import (
    by_mass,
    by_rejection,
    draft_row,
    next_child,
    token_at,
)


class Tree(NamedTuple):
    """The nodes, and their inputs."""

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
    sampling,
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
    tokens, parents, count = _nodes_of(slots, tree, b, NODES)
    scale, greedy, usable = temperature_of(sampling, b)
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
        if draft.logits is not None:
            draft_valid = _draft_valid(slots, tiles, b, node, scale, num_tiles, MERGED)
            has_child = tl.max((parents == node).to(tl.int32), 0) != 0
            valid = tl.where(draft_valid | (has_child == 0) | greedy, valid, 0)
        child = tl.full([], OUTSIDE, tl.int32)
        if valid != 0:
            if draft.logits is None or greedy:
                child, rest = by_mass(
                    target, tiles, tree, tokens, parents, row, b, node, scale, greedy, num_tiles,
                    TILE, NODES, MERGED,
                )  # fmt: skip
            else:
                child, rest, taken = by_rejection(
                    target, draft, slots, sampling, tiles, tree, tokens, parents, row, b, node,
                    scale, num_tiles, WITHOUT_REPLACEMENT, TILE, NODES, MERGED,
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
            # A tile with a mass has a token with one, by masses finer than the units of sums.
            weights = to_mass(weights_of(x, tl.max(x, 0), scale))
            weights = tl.where(x >= row.lowest, weights, 0)
            if has_rest:
                if draft.logits is None:
                    child = next_child(parents, node, -1, NODES)
                    while child < OUTSIDE:
                        weights = tl.where(ids == token_at(tokens, child, NODES), 0, weights)
                        child = next_child(parents, node, child, NODES)
                elif taken > 0:
                    draft_best, ratio, draft_lowest = draft_row(
                        slots, tiles, sampling, tree, row, b, node, taken, num_tiles, MERGED
                    )
                    y = load_at_target_ids(draft, tree.token_map, b, node, ids, ids < target.vocab)
                    left = residual_weights(
                        x, row.best, row.lowest, y, draft_best, draft_lowest, scale, ratio
                    )
                    weights = to_mass(left)
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
def _nodes_of(slots, tree, b, NODES: tl.constexpr):
    """Tokens and parents [NODES] of a tree, parent -1 if not a child; number of rows."""
    index = tl.arange(0, NODES)
    count = tl.load(slots.cu_rows + b + 1) - tl.load(slots.cu_rows + b)
    there = (index < tree.num_nodes) & (index < count)
    at = b.to(tl.int64) * tree.num_nodes + index
    tokens = tl.load(tree.token_ids + at, mask=there, other=-1)
    parents = tl.load(tree.parents + at, mask=there, other=-1)
    return tokens, tl.where((parents >= 0) & (parents < index), parents, -1), count


@triton.jit
def _row_of(target, slots, tiles, b, node, scale, num_tiles, MERGED: tl.constexpr):
    """The target row of a node, and whether it is valid."""
    slot = target_slot(slots, b, node)
    offset, row, _, _ = find_target(target, slots, slot)
    best, valid, maxima, masses = merge_row(tiles, slot, num_tiles, scale, MERGED)
    return Row(offset, row, slot, best, threshold_of(tiles, slot), maxima, masses), valid


@triton.jit
def _draft_valid(slots, tiles, b, node, scale, num_tiles, MERGED: tl.constexpr):
    slot = draft_slot(slots, b, node)
    _, valid, _, _ = merge_row(tiles, slot, num_tiles, scale, MERGED)
    return valid
