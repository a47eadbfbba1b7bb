"""Drafters of token trees, and of chains with siblings."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastspec.config import SpecConfig
from fastspec.config.tree_shapes import TreeShape
from fastspec.drafters import prompt_lookup
from fastspec.drafters.auto import build
from fastspec.drafters.base import Drafter, TreeProposer
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.suffix import SuffixDrafter
from fastspec.drafters.tree.drafter import CapePlan, TreeDrafter, TreePlan
from fastspec.drafters.tree.mixed import MixedTreeDrafter

__all__ = ["build", "with_siblings", "with_trees"]  # method "tree" builds what it grows trees with


def with_trees(plan: DrafterPlan, context: DrafterContext) -> DrafterPlan:
    """Plan trees from a draft model that would otherwise draft chains."""
    spec = context.spec
    shape = TreeShape(spec.tree_paths) if spec.tree_paths is not None else None
    tree = TreePlan(
        spec.value_of("tree_width"),
        spec.value_of("tree_nodes"),
        spec.draws_drafts,
        shape,
        spec.tree_suffix,
    )
    if spec.tree_suffix:
        copies, num = SuffixDrafter(*spec.suffix_limits), spec.num_model_tokens()
        mixed = partial(MixedTreeDrafter, plan=tree, copies=copies, num_tokens=num)
        return _over(plan, mixed, "tree_suffix")
    branch = prompt_lookup.build(context) if spec.tree_prompt_lookup else None
    return _over(plan, lambda draft: TreeDrafter(draft, tree, branch))


def with_siblings(plan: DrafterPlan, spec: SpecConfig) -> DrafterPlan:
    """Plan CaPE: the chains of a draft model, with siblings where it is unsure."""
    bins = tuple((bound, extra) for bound, extra in spec.value_of("cape_bins"))
    return _over(plan, lambda draft: TreeDrafter(draft, CapePlan(bins, spec.draws_drafts)))


def _over(
    plan: DrafterPlan,
    wrapped: Callable[[DraftModelDrafter], Drafter],
    option: str | None = None,
) -> DrafterPlan:
    """Wrap a plan's drafter to draft trees; one that already drafts trees is left unchanged, or
    refused if an option requires a draft model."""

    def drafter(target, block_manager) -> Drafter:
        draft = plan.build(target, block_manager)
        if isinstance(draft, TreeProposer) and option is None:
            return draft
        if not isinstance(draft, DraftModelDrafter):
            what = "drafter: trees need" if option is None else f"{option}: needs"
            raise ValueError(f"{what} a draft model, got {draft.name!r}")
        return wrapped(draft)

    return replace(plan, build=drafter)
