"""penalize: one program per row edits the logits that its lists name."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.cache_kernels import round_to
from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.slots import to_float
from fastspec_kernels.triton.tiles import next_power_of_2, vector_warps

_ENTRIES = 256


class Trees(NamedTuple):
    """The tree and node of each row, and the trees [B, N]."""

    row_sequence: Any
    row_node: Any
    tokens: Any
    parents: Any  # None: chains
    batch: Any
    num_nodes: Any


class Lists(NamedTuple):
    """The history and the bias of all sequences."""

    cu_history: Any
    history_ids: Any
    history_counts: Any
    cu_bias: Any
    bias_ids: Any
    bias: Any
    bias_until: Any


class Penalties(NamedTuple):
    """One value per sequence; None = off."""

    repetition: Any
    presence: Any
    frequency: Any


def penalize(
    logits: Tensor,
    row_sequence: Tensor,
    row_node: Tensor,
    tree_token_ids: Tensor,
    cu_history: Tensor,
    history_ids: Tensor,
    history_counts: Tensor,
    cu_bias: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    bias_until: Tensor,
    parents: Tensor | None,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
) -> None:
    """1 launch."""
    num_rows, vocab = logits.shape
    nodes = next_power_of_2(tree_token_ids.shape[1])
    launch(
        penalize_kernel,
        num_rows,
        logits,
        logits.stride(0),
        vocab,
        Trees(row_sequence, row_node, tree_token_ids, parents, *tree_token_ids.shape),
        Lists(cu_history, history_ids, history_counts, cu_bias, bias_ids, bias, bias_until),
        Penalties(repetition_penalty, presence_penalty, frequency_penalty),
        ENTRIES=_ENTRIES,
        NODES=nodes,
        INTERPRETED=logits.device.type == "cpu",
        num_warps=vector_warps(max(_ENTRIES, nodes)),
    )


@triton.jit
def penalize_kernel(
    logits,
    row_stride,
    vocab,
    trees,
    lists,
    penalties,
    ENTRIES: tl.constexpr,
    NODES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program per row. Each token is edited where it occurs first: history, bias, path."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.load(trees.row_sequence + row)
    start = tl.load(trees.row_node + row)
    exists = (b >= 0) & (b < trees.batch) & (start >= 0) & (start < trees.num_nodes)
    b = tl.where(exists, b, 0)
    start = tl.where(exists, start, 0)
    out = logits + row * row_stride
    tree = b.to(tl.int64) * trees.num_nodes

    inverse = tl.full([], 1.0, tl.float64)
    if penalties.repetition is not None:
        inverse = 1.0 / tl.load(penalties.repetition + b).to(tl.float64)

    position = tl.arange(0, NODES)
    path = tl.full([NODES], -1, tl.int32)
    depth = start * 0
    node = start
    while node > 0:
        path = tl.where(position == depth, tl.load(trees.tokens + tree + node), path)
        depth += 1
        node = _parent(trees, tree, node)
    counts, is_first = _count(path, position, trees, tree, start)

    first_known = tl.where(exists, tl.load(lists.cu_history + b), 0)
    end_known = tl.where(exists, tl.load(lists.cu_history + b + 1), 0)
    first_biased = tl.where(exists, tl.load(lists.cu_bias + b), 0)
    end_biased = tl.where(exists, tl.load(lists.cu_bias + b + 1), 0)

    for first in range(first_known, end_known, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        there = entry < end_known
        ids = tl.load(lists.history_ids + entry, mask=there, other=-1)
        count, _ = _count(ids, entry, trees, tree, start)
        count += tl.load(lists.history_counts + entry, mask=there, other=0)
        bias, biased = _bias_of(lists, ids, first_biased, end_biased, depth)
        _edit(
            out, ids, there, biased, bias, there, count, vocab, penalties, b, inverse, INTERPRETED
        )
    for first in range(first_biased, end_biased, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        there = entry < end_biased
        ids = tl.load(lists.bias_ids + entry, mask=there, other=-1)
        there &= depth < tl.load(lists.bias_until + entry, mask=there, other=0)
        _, known = _find(lists.history_ids, ids, first_known, end_known)
        count, _ = _count(ids, entry, trees, tree, start)
        bias = tl.load(lists.bias + entry, mask=there, other=0.0)
        _edit(
            out,
            ids,
            there & (known == 0),
            there,
            bias,
            count > 0,
            count,
            vocab,
            penalties,
            b,
            inverse,
            INTERPRETED,
        )
    _, known = _find(lists.history_ids, path, first_known, end_known)
    _, biased = _bias_of(lists, path, first_biased, end_biased, depth)
    own = is_first & (known == 0) & (biased == 0) & (position < depth)
    _edit(out, path, own, biased, 0.0, own, counts, vocab, penalties, b, inverse, INTERPRETED)


@triton.jit
def _parent(trees, tree, node):
    """The parent of a node; one that does not come before it ends the path."""
    parent = node - 1
    if trees.parents is not None:
        parent = tl.load(trees.parents + tree + node)
        parent = tl.where(parent < node, parent, 0)
    return parent


@triton.jit
def _count(ids, position, trees, tree, start):
    """How often each id is on the path, and whether it does not occur before `position`."""
    counts = tl.zeros(ids.shape, tl.int32)
    is_first = position >= 0
    node = start
    place = start * 0
    while node > 0:
        same = ids == tl.load(trees.tokens + tree + node)
        counts += same.to(tl.int32)
        is_first &= (same == 0) | (place >= position)
        place += 1
        node = _parent(trees, tree, node)
    return counts, is_first


@triton.jit
def _find(sorted_ids, ids, first, end):
    """Binary search in sorted_ids[first:end]: the place of each id, and whether it is there."""
    low = tl.zeros(ids.shape, tl.int32) + first
    high = tl.zeros(ids.shape, tl.int32) + end
    left = end - first
    while left > 0:
        middle = low + (high - low) // 2
        is_below = tl.load(sorted_ids + middle, mask=low < high, other=0) < ids
        searching = low < high
        low = tl.where(searching & is_below, middle + 1, low)
        high = tl.where(searching & (is_below == 0), middle, high)
        left = left // 2
    found = tl.load(sorted_ids + low, mask=low < end, other=0) == ids
    return low, found & (low < end)


@triton.jit
def _bias_of(lists, ids, first, end, depth):
    """The bias of each id at this depth, and whether there is one."""
    entry, there = _find(lists.bias_ids, ids, first, end)
    there &= depth < tl.load(lists.bias_until + entry, mask=there, other=0)
    return tl.load(lists.bias + entry, mask=there, other=0.0), there


@triton.jit
def _edit(
    out,
    ids,
    there,
    biased,
    bias,
    seen,
    count,
    vocab,
    penalties,
    b,
    inverse,
    INTERPRETED: tl.constexpr,
):
    """Read, change and write the logits of some ids, no two of them equal."""
    there &= (ids >= 0) & (ids < vocab)
    x = to_float(tl.load(out + ids, mask=there, other=0.0))
    x = tl.where(biased, x + bias, x)  # to add 0 would change the sign of a zero
    if penalties.repetition is not None:
        # Quotients of two 24-bit numbers are never so close to a tie that the rounding of the
        # inverse matters; a division here would be a call, for which registers are spilled.
        quotient = (x.to(tl.float64) * inverse).to(tl.float32)
        x = tl.where(seen, tl.where(x > 0, quotient, x * tl.load(penalties.repetition + b)), x)
    share = tl.zeros_like(x)
    if penalties.frequency is not None:
        share = tl.load(penalties.frequency + b) * count.to(tl.float32)
    if penalties.presence is not None:
        share += tl.load(penalties.presence + b)
    x = tl.where(count > 0, x - share, x)
    tl.store(out + ids, round_to(x, out.dtype.element_ty, INTERPRETED), mask=there)
