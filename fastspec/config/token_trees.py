"""Checks of the options of token trees, and of those that verify only chains."""

from collections.abc import Sequence
from typing import Any

from fastspec.config.checks import is_int, is_number, refuse, require
from fastspec.config.tree_shapes import TreeShape

MAX_TREE_NODES = 127  # of the 128 that attention takes one is the root


def as_tree_paths(paths: Any) -> Sequence[Sequence[int]]:
    """Checked tree_paths: ValueError unless they form a tree."""
    is_list = isinstance(paths, Sequence) and all(isinstance(path, Sequence) for path in paths)
    require("tree_paths", paths, is_list and not isinstance(paths, str), "a list of lists")
    TreeShape(paths)
    return paths


def as_cape_bins(bins: Any) -> Sequence[tuple[float, int]]:
    """Checked cape_bins: ValueError unless they cover every probability."""
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
    require("cape_bins", bins, rises, "probabilities above 0 that increase to 1")
    return bins


def check_trees(spec: Any) -> None:
    """Raise ValueError for options of a SpecConfig that cannot be combined, or not with trees."""
    _check_lossy_rules(spec)
    if spec.drafts_trees:
        require("cape", spec.cape, not spec.cape, "False for trees, which have their own siblings")
    if spec.drafts_trees or spec.cape:
        method = spec.rejection_sample_method
        fits = method != "block"
        require("rejection_sample_method", method, fits, "'standard' or 'coupled' for trees")
        is_constant = spec.schedule == "constant"
        require("schedule", spec.schedule, is_constant, "'constant' for trees")
        refuse("confidence_threshold", spec.confidence_threshold, "not for trees")
        copied, most = spec.suffix_tokens, MAX_TREE_NODES
        require("suffix_tokens", copied, (copied or 0) <= most, f"at most {most} for trees")
    if spec.tree_prompt_lookup:
        require("tree_prompt_lookup", True, spec.tree_paths is None, "False with tree_paths")
        require("tree_prompt_lookup", True, not spec.draws_drafts, "False for sampled siblings")
    if spec.tree_suffix:
        most = spec.value_of("tree_nodes") - 1
        fits = spec.tree_suffix <= most
        require("tree_suffix", spec.tree_suffix, fits, f"fewer than tree_nodes (at most {most})")
        given = {
            "tree_paths": spec.tree_paths is not None,
            "tree_prompt_lookup": spec.tree_prompt_lookup,
            "suffix_tokens": spec.suffix_tokens is not None,
        }
        for name in (name for name, is_given in given.items() if is_given):
            refuse("tree_suffix", spec.tree_suffix, f"not with {name}")
    if spec.tree_paths is not None:
        refuse("tree_width", spec.tree_width, "not with tree_paths")
        refuse("tree_nodes", spec.tree_nodes, "not with tree_paths")
        depth, size, most = (
            TreeShape(spec.tree_paths).depth,
            len(spec.tree_paths),
            spec.num_model_tokens(),
        )
        if depth > most or size > MAX_TREE_NODES:
            raise ValueError(
                f"tree_paths: expected at most {MAX_TREE_NODES} paths of up to"
                f" num_speculative_tokens ({most}) ranks, got {size} of up to {depth}"
            )
    if not spec.cape:
        refuse("cape_bins", spec.cape_bins, "only with cape")
        return
    most = max(extra for _, extra in spec.value_of("cape_bins"))
    nodes = spec.num_model_tokens() * (1 + most)
    if nodes > MAX_TREE_NODES:
        raise ValueError(
            f"cape_bins: {most} siblings for each of {spec.num_model_tokens()} tokens make a"
            f" tree of {nodes} nodes, more than {MAX_TREE_NODES}"
        )


def _check_lossy_rules(spec: Any) -> None:
    """Refuse lossy acceptance of anything but chains by the standard rule."""
    is_chain = not (spec.drafts_trees or spec.cape)
    fits = is_chain and spec.rejection_sample_method == "standard"
    factor, rate = spec.relaxed_acceptance, spec.synthetic_acceptance_rate
    others = "for trees, and for block and coupled verification"
    require("relaxed_acceptance", factor, factor == 1 or fits, f"1 {others}")
    fits, expected = fits and factor == 1, f"None {others}, or with relaxed_acceptance"
    require("synthetic_acceptance_rate", rate, rate is None or fits, expected)
