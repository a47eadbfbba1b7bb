"""Token trees from any draft model; the target verifies all their nodes in one pass."""

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
        width: maximum children per node.
        max_nodes: maximum nodes of a tree, excluding the root.
        is_probabilistic: draw siblings without replacement in batches that sample. The shape of
            these trees is fixed in advance, because which of the drawn tokens are kept must not
            depend on what they are.
        shape: shape of all trees; None = by draft probability, or balanced if siblings are drawn.
        num_copied: maximum nodes of a copied branch, less than max_nodes.
    """

    width: int
    max_nodes: int
    is_probabilistic: bool
    shape: TreeShape | None = None
    num_copied: int = 0

    def size(self, depth: int) -> int:
        """Return the maximum nodes of a tree whose paths may have that many tokens."""
        return self.max_nodes if self.shape is None else self.shape.num_nodes(depth)

    def start(
        self, batch: Batch, copies: Sequence[Sequence[int]] | None = None
    ) -> LikeliestTree | ShapedTree:
        """Start trees that have only roots; `copies` are used only if siblings are drawn."""
        depth, draws = batch.num_speculative_tokens, self.is_probabilistic and not batch.all_greedy
        if self.shape is not None:
            return ShapedTree(batch, self.shape, draws)
        if draws:
            # Copied tokens beyond the drawn ones need their own nodes; all do in coupled batches.
            beyond = self.num_copied if batch.is_coupled else max(0, self.num_copied - depth)
            shape = balanced_shape(self.width, self.max_nodes - beyond, depth)
            copied = None
            if copies is not None:
                copied = CopiedPaths(copies, beyond, shape.depth, batch.device)
            return ShapedTree(batch, shape, draws, copied=copied)
        # The draft model reads no more nodes than the target, whose slots are reserved.
        expanded = min(self.width, max(1, self.max_nodes // max(1, depth - 1)))
        return LikeliestTree(batch, expanded, self.width, self.max_nodes)


@dataclass(frozen=True)
class CapePlan:
    """A chain whose tokens have more siblings the less sure the draft model is.

    Attributes:
        bins: for each range of the most probable token's probability, its upper bound and the
            number of siblings added; the bounds rise to 1. Siblings have no children.
        is_probabilistic: in batches that sample, draw first the chain, then the siblings, without
            replacement; otherwise both are the most probable tokens.
    """

    bins: ConfidenceBins
    is_probabilistic: bool

    def size(self, depth: int) -> int:
        """Return the maximum nodes of a tree; ValueError if attention does not support as many."""
        size = depth * self._num_children
        if size > MAX_TREE_NODES:
            raise ValueError(
                f"n_spec_tokens: {depth} tokens with up to {self._num_children - 1} siblings make a"
                f" tree of {size} nodes, more than {MAX_TREE_NODES}"
            )
        return size

    def start(self, batch: Batch) -> LikeliestTree | ShapedTree:
        """Start trees that have only roots."""
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
    """Return the shape of a chain whose tokens are each the first of `num_children` siblings."""
    return TreeShape([(*[0] * d, rank) for d in range(depth) for rank in range(num_children)])


class TreeDrafter:
    """Drafts trees with a draft model, which runs one pass per level for all requests' trees.

    The draft model's cache keeps only committed tokens: accepted nodes of a tree are reread,
    together with the token after them, in the first pass of the next step.

    Args:
        draft: the draft model, which reads the texts.
        plan: the form of the trees.
        branch: proposes chains of point masses, which become branches of the trees. Only for plans
            whose trees consist of the most probable tokens and have no fixed shape.
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
            raise ValueError(f"drafter: {model.name} has recurrent layers and cannot draft trees")
        self.name = draft.name if isinstance(plan, CapePlan) else "tree"
        self.draft = draft
        self._plan = plan
        self._branch = branch
        self.copies_texts, self.reads_target = branch is not None, draft.reads_target

    def max_nodes(self, num_speculative_tokens: int) -> int:
        """Return the maximum nodes of a tree whose paths may have that many tokens."""
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
        """Grow the trees level by level; return each request's passes by the model's name."""
        depths = [
            min(tree.max_depth, wanted, self.draft.room(len(request.token_ids)))
            for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        counts = grow(tree, self.draft, batch, depths)
        return [{self.draft.name: count} for count in counts]
