"""Checks of the options of token trees."""

from collections.abc import Sequence
from typing import Any

from fastspec.config.checks import is_int, is_number, normalise_ints, refuse, require
from fastspec.config.methods import method_named
from fastspec.config.tree_shapes import TreeShape

DEFAULT_TREE_WIDTH = 4
DEFAULT_TREE_NODES = 16
DEFAULT_CAPE_BINS = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
MAX_TREE_NODES = 127  # of the 128 that attention takes one is the root


def check_trees(spec: Any) -> None:
    """Raise ValueError for options of a SpecConfig about trees that cannot be met."""
    if spec.method == "tree" or spec.cape:
        method = spec.rejection_sample_method
        require("rejection_sample_method", method, method == "standard", "'standard' for trees")
        is_constant = spec.schedule == "constant"
        require("schedule", spec.schedule, is_constant, "'constant' for trees")
    if spec.method == "tree":
        _check_form(spec)
    branch = spec.tree_prompt_lookup
    require("tree_prompt_lookup", branch, isinstance(branch, bool), "a bool")
    if branch:
        is_one = spec.method == "tree" and spec.tree_paths is None
        require("tree_prompt_lookup", branch, is_one, "False without a tree that grows freely")
        require("tree_prompt_lookup", branch, not spec.draws_drafts, "False for drawn siblings")
    _check_cape(spec)


def _check_form(spec: Any) -> None:
    """Check width, number and places of the nodes."""
    paths = spec.tree_paths
    for name in ("tree_width", "tree_nodes"):
        if paths is not None:
            refuse(name, getattr(spec, name), "not beside tree_paths")
    normalise_ints(spec, 1, "tree_width", "tree_nodes", most=MAX_TREE_NODES)
    if paths is None:
        return
    is_list = isinstance(paths, Sequence) and all(isinstance(path, Sequence) for path in paths)
    require("tree_paths", paths, is_list and not isinstance(paths, str), "a list of lists")
    depth, size = TreeShape(paths).depth, len(paths)
    most = spec.num_draft_tokens()
    if depth > most or size > MAX_TREE_NODES:
        raise ValueError(
            f"tree_paths: expected at most {MAX_TREE_NODES} paths of num_speculative_tokens,"
            f" {most}, ranks, got {size} of up to {depth}"
        )


def _check_cape(spec: Any) -> None:
    require("cape", spec.cape, isinstance(spec.cape, bool), "a bool")
    bins = spec.cape_bins
    if not spec.cape:
        refuse("cape_bins", bins, "only with cape")
        return
    has_cape = "cape" in method_named(spec.method).fields
    require("cape", spec.cape, has_cape, f"False for method {spec.method!r}")
    if bins is not None:
        are_pairs = isinstance(bins, Sequence) and all(
            isinstance(pair, Sequence)
            and len(pair) == 2
            and is_number(pair[0])
            and is_int(pair[1])
            and pair[1] >= 0
            for pair in bins
        )
        require("cape_bins", bins, are_pairs, "pairs of a probability and an int >= 0")
        bounds = [bound for bound, _ in bins]
        rises = sorted(set(bounds)) == bounds and bounds[-1:] == [1.0] and bounds[0] > 0
        require("cape_bins", bins, rises, "probabilities above 0 that rise to 1")
    most = max(extra for _, extra in bins or DEFAULT_CAPE_BINS)
    nodes = spec.num_draft_tokens() * (1 + most)
    if nodes > MAX_TREE_NODES:
        raise ValueError(
            f"cape_bins: {most} siblings for each of {spec.num_draft_tokens()} tokens make a"
            f" tree of {nodes} nodes, more than {MAX_TREE_NODES}"
        )
