"""Drafters of token trees from the options that ask for them."""

from fastspec.config import SpecConfig
from fastspec.config.token_trees import (
    DEFAULT_CAPE_BINS,
    DEFAULT_TREE_NODES,
    DEFAULT_TREE_WIDTH,
)
from fastspec.config.tree_shapes import TreeShape
from fastspec.drafters import (
    CapePlan,
    Drafter,
    DraftModelDrafter,
    PromptLookupDrafter,
    TreeDrafter,
    TreePlan,
    TreeProposer,
)


def as_trees(drafter: Drafter, spec: SpecConfig, backend: str) -> Drafter:
    """A drafter as it is or, if the options ask for trees, one that drafts these with its model.

    Raises:
        ValueError: the drafter is no draft model.
    """
    if (spec.method != "tree" and not spec.cape) or isinstance(drafter, TreeProposer):
        return drafter
    if not isinstance(drafter, DraftModelDrafter):
        raise ValueError(f"drafter: trees need a draft model, got {drafter.name!r}")
    draws = spec.draws_drafts
    if spec.cape:
        bins = spec.cape_bins or DEFAULT_CAPE_BINS
        return TreeDrafter(drafter, CapePlan(tuple((bound, extra) for bound, extra in bins), draws))
    plan = TreePlan(
        spec.tree_width or DEFAULT_TREE_WIDTH,
        spec.tree_nodes or DEFAULT_TREE_NODES,
        draws,
        TreeShape(spec.tree_paths) if spec.tree_paths is not None else None,
    )
    takes_branch = spec.tree_prompt_lookup
    branch = PromptLookupDrafter(*spec.lookup_lengths, backend) if takes_branch else None
    return TreeDrafter(drafter, plan, branch)
