"""Options of schedules: their values, and how they can be combined."""

from typing import Any

from fastspec.config.checks import is_number, refuse, require
from fastspec.config.options import Kind

_METHODS = ("num_draft_tokens", "record")


def _is_schedule(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("constant", "adaptive", "heuristic")
    return all(callable(getattr(value, name, None)) for name in _METHODS)


SCHEDULE = Kind(
    "'constant', 'adaptive', 'heuristic' or an object with num_draft_tokens() and record()",
    _is_schedule,
)
STEP_COSTS = Kind(
    "a list of positive numbers, for steps with 0 to K draft tokens",
    lambda value: (
        isinstance(value, (list, tuple)) and all(is_number(cost) and cost > 0 for cost in value)
    ),
    lambda value: tuple(float(cost) for cost in value),
    "json",
)


def check_step_costs(spec: Any) -> None:
    """Raise ValueError if the step_costs of a SpecConfig are missing, unused or too few."""
    costs = spec.step_costs
    if costs is None:
        fits = spec.confidence_threshold is None or spec.schedule != "adaptive"
        expected = "'constant' with confidence_threshold, unless step_costs is given"
        return require("schedule", spec.schedule, fits, expected)
    if spec.schedule != "adaptive":
        refuse("step_costs", costs, "only with schedule 'adaptive'")
    count = spec.num_model_tokens() + 1
    expected = f"{count} positive numbers, for steps with 0 to {count - 1} draft tokens"
    require("step_costs", costs, len(costs) == count, expected)
