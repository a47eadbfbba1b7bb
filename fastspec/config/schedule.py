"""Checks of how the number of draft tokens changes from step to step."""

from typing import Any

from fastspec.config.checks import is_number, refuse, require

SCHEDULES = ("constant", "adaptive")


def is_own_schedule(schedule: Any) -> bool:
    """Whether it is an object with the methods of `fastspec.engine.schedule.Schedule`."""
    return all(callable(getattr(schedule, name, None)) for name in ("num_draft_tokens", "record"))


def as_step_costs(schedule: Any, step_costs: Any, num_speculative_tokens: int) -> Any:
    """The costs as a tuple, or None.

    Raises:
        ValueError: no such schedule; costs that it does not read, or that are no K + 1 numbers > 0.
    """
    known = f"one of {SCHEDULES} or an object with num_draft_tokens() and record()"
    fits = schedule in SCHEDULES if isinstance(schedule, str) else is_own_schedule(schedule)
    require("schedule", schedule, fits, known)
    if step_costs is None:
        return None
    if schedule != "adaptive":
        refuse("step_costs", step_costs, "only with schedule 'adaptive'")
    count = num_speculative_tokens + 1
    expected = f"{count} positive numbers, of steps with 0 to {count - 1} draft tokens"
    is_list = isinstance(step_costs, (list, tuple)) and len(step_costs) == count
    usable = is_list and all(is_number(cost) and cost > 0 for cost in step_costs)
    require("step_costs", step_costs, usable, expected)
    return tuple(float(cost) for cost in step_costs)
