"""Verify that all methods say the same, then time them interleaved."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastspec.config import SamplingParams
from fastspec.config.checks import is_int, require
from fastspec.engine.stats import SpecStats
from fastspec.tools.bench.methods import Decode, Methods, TokenIds
from fastspec.tools.cost_counters import standardized_walltime_improvement

RATIOS = {
    "speculative / plain": ("speculative", ("plain",)),
    "speculative / hf_assisted": ("speculative", ("hf_assisted", "hf_assisted_default")),
    "plain / hf_generate": ("plain", ("hf_generate",)),
}

# What a result says of our drafts.
ACCEPTANCE = (
    "acceptance_rate",
    "mean_acceptance_length",
    "swi",
    "draft_cost",
    "judge_cost",
    "predicted_speed_up",
    "efficiency",
)


class Mismatch(ValueError):
    """Greedy outputs that should be equal are not."""


@dataclass(frozen=True)
class BenchConfig:
    """What is timed.

    Args:
        max_tokens: new tokens of each prompt, end-of-sequence ids ignored, >= 1.
        repeats: timed rounds over all prompts, >= 1.
        temperatures: at least one, each >= 0.
    Raises:
        ValueError: a value out of range.
    """

    max_tokens: int = 128
    repeats: int = 3
    temperatures: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self):
        for name in ("max_tokens", "repeats"):
            value = getattr(self, name)
            require(name, value, is_int(value) and value >= 1, "an int >= 1")
        if not self.temperatures:
            raise ValueError("temperatures: expected numbers >= 0, got none")
        for temperature in self.temperatures:
            try:
                SamplingParams(temperature=temperature)
            except ValueError as error:
                raise ValueError(f"temperatures: {error}") from error

    def num_runs(self, num_prompts: int, num_methods: int) -> int:
        """Calls of a method that verify_outputs() and measure() make together."""
        rounds = 1 + self.repeats * len(self.temperatures)
        return rounds * num_prompts * num_methods


def verify_outputs(
    methods: Methods, prompts: list[TokenIds], advance: Callable[[], None]
) -> dict[str, int]:
    """Compare the greedy ids of every method with those of our plain decoding; also warms them up.

    Returns:
        For each other method, the number of prompts where all ids are equal.
    Raises:
        ValueError: a prompt without room for the new tokens, or a method that made fewer.
    """
    for index, prompt in enumerate(prompts):
        excess = len(prompt) - methods.max_prompt_len
        if excess > 0:
            raise ValueError(
                f"max_tokens: with the {len(prompt)} tokens of prompt {index + 1}, {excess} more"
                " than the models take"
            )
    decoders = methods.by_name()
    equal = dict.fromkeys((name for name in decoders if name != "plain"), 0)
    for prompt in prompts:
        ids = {}
        for name, decode in decoders.items():
            ids[name] = decode(prompt, 0.0, 0)
            advance()
            if len(ids[name]) != methods.max_tokens:
                raise Mismatch(f"{name}: {len(ids[name])} new tokens, not {methods.max_tokens}")
        for name in equal:
            equal[name] += ids[name] == ids["plain"]
    return equal


def require_equal(equal: dict[str, int], num_prompts: int) -> None:
    """Raise Mismatch unless every method agreed on every prompt."""
    for name, count in equal.items():
        if count < num_prompts:
            raise Mismatch(
                f"greedy outputs differ: {name} and plain agree on {count} of {num_prompts} prompts"
            )


def measure(
    methods: Methods,
    prompts: list[TokenIds],
    config: BenchConfig,
    advance: Callable[[], None],
) -> list[dict]:
    """Time every method at every temperature, interleaved so that noise hits all alike.

    Returns:
        For each temperature a dictionary: new tokens per second by method (all prompts' tokens over
        the median, across rounds, of all prompts' seconds), their ratios, our acceptance, our SWI
        with parameters as costs, what drafting and judging cost in plain steps, the speed-up over
        plain decoding that acceptance and the cost of drafting predict, if judging the drafts cost
        no more than a plain step, and what part of it was reached.
    """
    return [
        _measure_at(temperature, methods, prompts, config, advance)
        for temperature in config.temperatures
    ]


def _measure_at(
    temperature: float,
    methods: Methods,
    prompts: list[TokenIds],
    config: BenchConfig,
    advance: Callable[[], None],
) -> dict:
    decoders = list(methods.by_name().items())
    seconds = {name: [0.0] * config.repeats for name, _ in decoders}
    runs: dict[str, list[SpecStats]] = {"plain": [], "speculative": []}
    for round_index in range(config.repeats):
        for seed, prompt in enumerate(prompts):
            first = (round_index + seed) % len(decoders)
            for name, decode in decoders[first:] + decoders[:first]:
                seconds[name][round_index] += _timed(decode, prompt, temperature, seed)
                if name in runs:
                    runs[name].append(methods.last_stats)
                advance()
    num_tokens = len(prompts) * config.max_tokens
    speeds = {name: num_tokens / statistics.median(rounds) for name, rounds in seconds.items()}
    pairs = dict(RATIOS)
    if methods.parts:
        pairs["cascade / the better of its parts"] = ("speculative", tuple(methods.parts))
    ratios = {
        label: round(speeds[ours] / max(speeds[name] for name in theirs), 3)
        for label, (ours, theirs) in pairs.items()
    }
    draft_cost, judge_cost = step_costs(runs["plain"], runs["speculative"])
    predicted = predicted_speed_up(runs["plain"], runs["speculative"])
    return {
        "temperature": temperature,
        "tokens_per_s": {name: round(speed, 2) for name, speed in speeds.items()},
        "seconds": {name: [round(s, 4) for s in rounds] for name, rounds in seconds.items()},
        "ratios": ratios,
        **_acceptance(runs["speculative"]),
        "swi": round(swi(runs["speculative"], *methods.num_parameters), 3),
        "draft_cost": round(draft_cost, 3),
        "judge_cost": round(judge_cost, 3),
        "predicted_speed_up": round(predicted, 3),
        "efficiency": round(ratios["speculative / plain"] / predicted, 3),
    }


def predicted_speed_up(plain: list[SpecStats], speculative: list[SpecStats]) -> float:
    """Tokens of a step over its cost in plain steps: 1 for the target's pass, and the drafts'.

    With k draft tokens of cost c each and independent acceptance a this is the formula of
    Leviathan et al., 2211.17192: (1 - a^(k+1)) / ((1 - a) (k c + 1)).
    """
    draft_cost, _ = step_costs(plain, speculative)
    num_tokens = sum(stats.num_output_tokens for stats in speculative)
    return num_tokens / _num_steps(speculative) / (1 + draft_cost)


def step_costs(plain: list[SpecStats], speculative: list[SpecStats]) -> tuple[float, float]:
    """Mean time of drafting, and of the target's pass with all that judging takes, in plain steps.

    A pass over the many rows of a token tree costs more than one over a single token where
    computing, not reading the weights, takes the time: on a CPU.
    """
    plain_step = _seconds(plain, "verify", "commit") / _num_steps(plain)
    step = plain_step * _num_steps(speculative)
    judging = _seconds(speculative, "verify", "commit")
    return _seconds(speculative, "propose") / step, judging / step


def swi(runs: list[SpecStats], target_cost: float, draft_cost: float) -> float:
    """Chen et al.'s SWI of runs with at most one draft model; drafters that copy cost nothing.

    Args:
        runs: their counters.
        target_cost, draft_cost: of one pass, in any unit: parameters, for example.
    """
    passes = {"target": _num_steps(runs)}
    for name in {name for stats in runs for name in stats.num_draft_passes}:
        passes[name] = sum(stats.num_draft_passes.get(name, 0) for stats in runs)
    costs = {**dict.fromkeys(passes, draft_cost), "target": target_cost}
    num_tokens = sum(stats.num_output_tokens for stats in runs)
    return standardized_walltime_improvement(num_tokens, "target", passes, costs)


def _seconds(runs: list[SpecStats], *phases: str) -> float:
    return sum(stats.seconds[phase] for stats in runs for phase in phases)


def _num_steps(runs: list[SpecStats]) -> int:
    return sum(stats.num_steps for stats in runs)


def _timed(decode: Decode, prompt: TokenIds, temperature: float, seed: int) -> float:
    start = time.perf_counter()
    decode(prompt, temperature, seed)
    return time.perf_counter() - start


def _acceptance(runs: list[SpecStats]) -> dict[str, float | None]:
    num_drafted = sum(stats.num_draft_tokens for stats in runs)
    num_accepted = sum(stats.num_accepted_tokens for stats in runs)
    num_emitted = sum(stats.num_output_tokens for stats in runs)
    return {
        "acceptance_rate": round(num_accepted / num_drafted, 4) if num_drafted else None,
        "mean_acceptance_length": round(num_emitted / _num_steps(runs), 4),
    }
