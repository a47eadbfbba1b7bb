"""Costs counted in passes of each model, as Chen et al. (2312.11462) publish them: the SWI.

Such counts leave out lengths, kernels and the host: report them together with measured wall time.
"""

import re
from collections.abc import Mapping

from fastspec.config.checks import require, require_one_of
from fastspec.config.methods import BUILT_IN

# One pass of each model, by the part of its name that stands between other signs. In a name with a
# number of parameters, such as 67b, the other parts say nothing of its size.
COSTS: Mapping[str, Mapping[str, float]] = {
    # Millions of parameters. The published table counts 70000 for a LLaMA of 7 billion, which makes
    # its drafts look ten times cheaper; it is 7000 here.
    "model_parameters": {
        "xxl": 11300,
        "xl": 3000,
        "large": 770,
        "base": 220,
        "small": 60,
        "llama-68m": 68,
        "llama-160m": 160,
        "7b": 7000,
        "llama": 7000,  # where its name says no size
    },
    # Time of a pass over that of T5-XXL, from Leviathan et al., 2211.17192.
    "previous_work": {"xxl": 1, "large": 0.11, "base": 0.04, "small": 0.02},
}
_FREE = [m.name for m in BUILT_IN if m.proposes and not (m.takes_draft or m.reads_target)]

CostTable = str | Mapping[str, float]


def pass_cost(model: str, counter_version: CostTable = "model_parameters") -> float:
    """Cost of one pass of a model; drafters that copy cost nothing.

    Args:
        model: its name.
        counter_version: a published table, which matches parts of names, or costs by full name.
    Raises:
        ValueError: no such table, or a model that it does not contain.
    """
    if model in _FREE:
        return 0.0
    check_counter(counter_version)
    if not isinstance(counter_version, str):
        require_one_of("model", model, counter_version)
        return float(counter_version[model])
    table = COSTS[counter_version]
    parts = re.findall(r"llama-\d+m(?![a-z0-9])|[a-z0-9]+(?:\.\d[a-z0-9]*)*", model.lower())
    sizes = [part for part in parts if re.search(r"\d[mb]$", part)]
    part = next((part for part in sizes or parts if part in table), None)
    if part is None:
        known = f"has no cost for {model!r}, only for {[*table]}"
        raise ValueError(f"counter_version: {counter_version} {known}")
    return float(table[part])


def check_counter(counter_version: CostTable) -> None:
    """Raise ValueError unless these are costs by name, or the name of a published table."""
    if isinstance(counter_version, str):
        require_one_of("counter_version", counter_version, COSTS)


def total_cost(passes: Mapping[str, int], counter_version: CostTable = "model_parameters") -> float:
    """Sum over the models of passes times the cost of one.

    Raises:
        ValueError: see `pass_cost`; or a negative count.
    """
    for model, count in passes.items():
        require(f"passes[{model!r}]", count, count >= 0, "a count >= 0")
    return sum(count * pass_cost(model, counter_version) for model, count in passes.items())


def standardized_walltime_improvement(
    num_tokens: int,
    target: str,
    passes: Mapping[str, int],
    counter_version: CostTable = "model_parameters",
) -> float:
    """SWI: cost of plain decoding, one target pass per token, over the cost that was counted.

    Args:
        num_tokens: number of tokens in the target's text.
        target: name of the target.
        passes: number of passes by model, including the target.
        counter_version: "model_parameters", "previous_work", or costs by name.
    Raises:
        ValueError: see `total_cost`; or nothing was counted.

    Source: Chen et al., 2312.11462.
    """
    total = total_cost(passes, counter_version)
    require("passes", dict(passes), total > 0, "at least one pass that costs something")
    return num_tokens * pass_cost(target, counter_version) / total
