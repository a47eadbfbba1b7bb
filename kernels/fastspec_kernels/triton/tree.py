"""verify_tree and build_tree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec_kernels.triton.launch import launch
from fastspec_kernels.triton.slots import Params, Slots
from fastspec_kernels.triton.statistics import draft_rows, target_rows, tiles_of
from fastspec_kernels.triton.tiles import next_power_of_2, tiling_of, vector_warps
from fastspec_kernels.triton.tree_walk import Tree, Walked, walk_kernel


def verify_tree(
    target_logits: Tensor,
    cu_rows: Tensor,
    tree_token_ids: Tensor,
    parents: Tensor,
    uniform_samples: Tensor,
    sibling_rule: str,
    draft_logits: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    draft_token_map: Tensor | None,
    token_bitmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """2 launches, not counting those of the filters.

    All rows get their statistics first, in parallel, instead of one program reading the rows of
    the path one after the other; with few sequences this keeps a GPU busy.
    """
    batch, num_nodes = tree_token_ids.shape
    tiling = tiling_of(target_logits.shape[1])
    sampling = Params(temperature, top_k, top_p, min_p)
    target, draft = target_rows(target_logits, token_bitmask), draft_rows(draft_logits)
    draft_steps = 0 if draft_logits is None else num_nodes
    slots = Slots(num_nodes, draft_steps, cu_rows, None)
    tiles = tiles_of(target, draft, slots, sampling, batch * (num_nodes + draft_steps))
    tree = Tree(tree_token_ids, parents, uniform_samples, None, draft_token_map, num_nodes)
    walked = Walked(
        path=torch.empty_like(tree_token_ids),
        output_token_ids=torch.empty_like(tree_token_ids),
        accepted_len=tree_token_ids.new_empty((batch,)),
        logprobs=torch.empty_like(tree_token_ids, dtype=torch.float32),
    )
    launch(
        walk_kernel,
        batch,
        target,
        draft,
        slots,
        sampling,
        tiles,
        tree,
        walked,
        tiling.num_tiles,
        WITHOUT_REPLACEMENT=sibling_rule == "without_replacement",
        TILE=tiling.tile,
        NODES=next_power_of_2(num_nodes),
        MERGED=tiling.merged,
        num_warps=tiling.search_warps,
    )
    return walked.path, walked.output_token_ids, walked.accepted_len, walked.logprobs


def build_tree(parents: Tensor) -> tuple[Tensor, Tensor]:
    """1 launch."""
    batch, num_nodes = parents.shape
    words = (num_nodes + 63) // 64
    depths = torch.empty_like(parents)
    ancestor_mask = parents.new_empty((batch, num_nodes, words), dtype=torch.int64)
    block = next_power_of_2(words)
    launch(
        build_tree_kernel,
        batch * num_nodes,
        parents,
        depths,
        ancestor_mask,
        num_nodes,
        words,
        WORDS=block,
        num_warps=vector_warps(block),
    )
    return depths, ancestor_mask


@triton.jit
def build_tree_kernel(parents, depths, ancestor_mask, num_nodes, words, WORDS: tl.constexpr):
    """One program per node: climbs to the root."""
    b = tl.program_id(0) // num_nodes
    start = tl.program_id(0) % num_nodes
    word = tl.arange(0, WORDS)
    first = parents + b.to(tl.int64) * num_nodes
    mask = tl.zeros([WORDS], tl.int64)
    node = start
    depth = tl.full([], 0, tl.int32)
    climbing = tl.where(node > 0, 1, 0)
    mask |= tl.where(word == node // 64, _bit(node), 0)
    while climbing != 0:
        parent = tl.load(first + node)
        if (parent >= 0) & (parent < node):
            node = parent
            depth += 1
            mask |= tl.where(word == node // 64, _bit(node), 0)
            climbing = tl.where(node > 0, 1, 0)
        else:
            depth = tl.full([], -1, tl.int32)
            climbing = tl.full([], 0, tl.int32)
    out = (b.to(tl.int64) * num_nodes + start) * words + word
    tl.store(ancestor_mask + out, tl.where(depth >= 0, mask, 0), mask=word < words)
    tl.store(depths + tl.program_id(0), depth)


@triton.jit
def _bit(node):
    return tl.full([], 1, tl.int64) << (node % 64).to(tl.int64)
