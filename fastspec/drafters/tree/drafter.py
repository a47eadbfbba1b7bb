"""Token trees over any draft model: the target judges every node of them in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from fastspec.config.token_trees import MAX_TREE_NODES
from fastspec.config.tree_shapes import TreeShape, balanced_shape
from fastspec.drafters.base import Batch, Drafter, Proposal, Request
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.tree.copied import CopiedPaths
from fastspec.drafters.tree.grow import LikeliestTree, ShapedTree, grow
from fastspec.drafters.tree.siblings import ConfidenceBins


@dataclass(frozen=True)
class TreePlan:
    """The form of the trees.

    Attributes:
        width: children of a node at most.
        max_nodes: of a tree, the root not counted.
        is_probabilistic: in batches that sample, siblings are drawn without replacement. These
            trees have a shape that is fixed beforehand: which of the drawn tokens are kept must not
            depend on what they are.
        shape: of all trees; None = by draft probability, or balanced if siblings are drawn.
        num_copied: nodes that a copied branch takes at most, fewer than max_nodes.
    """

    width: int
    max_nodes: int
    is_probabilistic: bool
    shape: TreeShape | None = None
    num_copied: int = 0

    def size(self, depth: int) -> int:
        """Nodes of a tree at most, when paths may have that many tokens."""
        return self.max_nodes if self.shape is None else self.shape.num_nodes(depth)

    def start(
        self, batch: Batch, copies: Sequence[Sequence[int]] | None = None
    ) -> LikeliestTree | ShapedTree:
        """Trees of roots alone; `copies` are for those whose siblings are drawn and judged so."""
        depth, draws = batch.num_speculative_tokens, self.is_probabilistic and not batch.all_greedy
        if self.shape is not None:
            return ShapedTree(batch, self.shape, draws)
        if draws:
            # What of a copy goes beyond the drawn tokens has nodes of its own; drawn by place, all.
            beyond = self.num_copied if batch.is_coupled else max(0, self.num_copied - depth)
            shape = balanced_shape(self.width, self.max_nodes - beyond, depth)
            copied = None
            if copies is not None:
                copied = CopiedPaths(copies, beyond, shape.depth, batch.device)
            return ShapedTree(batch, shape, draws, copied=copied)
        # No more nodes are read by the draft model than by the target: their slots are reserved.
        expanded = min(self.width, max(1, self.max_nodes // max(1, depth - 1)))
        return LikeliestTree(batch, expanded, self.width, self.max_nodes)


@dataclass(frozen=True)
class CapePlan:
    """A chain whose tokens have the more siblings, the less sure the draft model is.

    Attributes:
        bins: for each range of the likeliest token's probability, its upper bound and how many
            siblings are added; the bounds rise to 1. Siblings have no children.
        is_probabilistic: in batches that sample, the chain is drawn, and the siblings after it,
            without replacement; otherwise both are the likeliest tokens.
    """

    bins: ConfidenceBins
    is_probabilistic: bool

    def size(self, depth: int) -> int:
        """Nodes of a tree at most; ValueError when that is more than attention takes."""
        size = depth * self._num_children
        if size > MAX_TREE_NODES:
            raise ValueError(
                f"n_spec_tokens: {depth} tokens with up to {self._num_children - 1} siblings make a"
                f" tree of {size} nodes, more than {MAX_TREE_NODES}"
            )
        return size

    def start(self, batch: Batch) -> LikeliestTree | ShapedTree:
        """Trees of roots alone."""
        depth = batch.num_speculative_tokens
        size = self.size(depth)
        if self.is_probabilistic and not batch.all_greedy:
            return ShapedTree(batch, _cape_shape(depth, self._num_children), True, self.bins)
        return LikeliestTree(batch, 1, self._num_children, size, self.bins)

    @property
    def _num_children(self) -> int:
        return 1 + max(extra for _, extra in self.bins)


@cache
def _cape_shape(depth: int, num_children: int) -> TreeShape:
    """A chain, each of its tokens the first of so many siblings."""
    return TreeShape([(*[0] * d, rank) for d in range(depth) for rank in range(num_children)])


class TreeDrafter:
    """Drafts trees with a draft model, one pass of it for each level of all requests' trees.

    The draft model's cache keeps committed tokens only: what was accepted of a tree is read again,
    together with the token after it, in the first pass of the next step.

    Args:
        draft: the draft model, which reads the texts.
        plan: the form of the trees.
        branch: proposes chains of point masses, which become branches of the trees. Only for plans
            whose trees are made of likeliest tokens and have no fixed shape.
    Raises:
        ValueError: the draft model has recurrent layers.
    """

    def __init__(
        self,
        draft: DraftModelDrafter,
        plan: TreePlan | CapePlan,
        branch: Drafter | None = None,
    ):
        model = draft.runner.paged_model
        if model.recurrent is not None:
            raise ValueError(f"drafter: {model.name} has recurrent layers, and drafts no trees")
        self.name = draft.name if isinstance(plan, CapePlan) else "tree"
        self.draft = draft
        self._plan = plan
        self._branch = branch

    def max_nodes(self, num_speculative_tokens: int) -> int:
        """Nodes of a tree at most, when paths may have that many tokens."""
        return self._plan.size(num_speculative_tokens)

    def propose(self, batch: Batch) -> Proposal:
        tree = self._plan.start(batch)
        passes = self._grow(tree, batch)
        if self._branch is not None and isinstance(tree, LikeliestTree):
            tree.add_branch(self._branch.propose(batch).token_ids)
        return replace(tree.proposal(), passes=passes)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        self.draft.commit(batch, accepted)
        if self._branch is not None:
            self._branch.commit(batch, accepted)

    def release(self, request: Request) -> None:
        self.draft.release(request)
        if self._branch is not None:
            self._branch.release(request)

    def _grow(self, tree: LikeliestTree | ShapedTree, batch: Batch) -> list[dict[str, int]]:
        """Read the trees level by level; passes of each request, by the draft model's name."""
        depths = [
            min(tree.max_depth, wanted, self.draft.room(len(request.token_ids)))
            for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        counts = grow(tree, self.draft, batch, depths)
        return [{self.draft.name: count} for count in counts]
