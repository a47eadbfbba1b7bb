"""End-to-end measurement: our decoding and Hugging Face's, same weights and prompts, in one run.

All methods are first checked to give the same output, and then timed interleaved.
"""

import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import fastspec
from fastspec.engine.stats import SpecStats
from fastspec.tools.cost_counters import standardized_walltime_improvement
from fastspec.tools.settings import BenchConfig
from fastspec.tools.timed_methods import Methods, TokenIds
from fastspec_kernels import cpu_instruction_set

ROOT = Path(fastspec.__file__).resolve().parents[1]
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


def verify_outputs(
    methods: Methods, prompts: list[TokenIds], advance: Callable[[], None]
) -> dict[str, int]:
    """Compare the greedy ids of every method with those of our plain decoding; also warms them up.

    Those of `methods.uncompared` only warm up.

    Returns:
        For each method that is compared, the number of prompts where all ids are equal.
    Raises:
        ValueError: a prompt without room for the new tokens, or a method that made fewer.
    """
    for index, prompt in enumerate(prompts):
        excess = len(prompt) - methods.max_prompt_len
        if excess > 0:
            raise ValueError(
                f"max_tokens: with the {len(prompt)} tokens of prompt {index + 1}, {excess} more"
                " than the models accept"
            )
    decoders = methods.by_name()
    compared = (name for name in decoders if name not in {"plain", *methods.uncompared})
    equal = dict.fromkeys(compared, 0)
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
        with the costs of methods, the costs of drafting and verifying in plain steps, the speed-up
        over plain decoding that acceptance, the cost of drafting and the reading of the prompts
        predict if verifying the drafts costs no more than a plain step, and the fraction of it that
        was reached.
    """
    decoders, results = list(methods.by_name().items()), []
    pairs = dict(RATIOS)
    if methods.parts:
        pairs["cascade / the better of its parts"] = ("speculative", tuple(methods.parts))
    for temperature in config.temperatures:
        seconds = {name: [0.0] * config.repeats for name, _ in decoders}
        plain, ours = SpecStats(), SpecStats()
        totals = {"plain": plain, "speculative": ours}
        for round_index in range(config.repeats):
            for seed, prompt in enumerate(prompts):
                first = (round_index + seed) % len(decoders)
                for name, decode in decoders[first:] + decoders[:first]:
                    start = time.perf_counter()
                    decode(prompt, temperature, seed)
                    seconds[name][round_index] += time.perf_counter() - start
                    if name in totals:
                        totals[name].add(methods.last_stats)
                    advance()
        num_tokens = len(prompts) * config.max_tokens
        speeds = {name: num_tokens / statistics.median(rounds) for name, rounds in seconds.items()}
        ratios = {
            label: round(speeds[method] / max(speeds[name] for name in others), 3)
            for label, (method, others) in pairs.items()
            if {*others} <= {*speeds}
        }
        draft_cost, judge_cost = step_costs(plain, ours)
        predicted, rate = predicted_speed_up(plain, ours), ours.acceptance_rate
        result = {
            "temperature": temperature,
            "tokens_per_s": {name: round(speed, 2) for name, speed in speeds.items()},
            "seconds": {name: [round(s, 4) for s in rounds] for name, rounds in seconds.items()},
            "ratios": ratios,
            "acceptance_rate": None if rate is None else round(rate, 4),
            "mean_acceptance_length": round(ours.num_output_tokens / ours.num_steps, 4),
            "swi": round(swi(ours, *methods.costs, names=methods.levels), 3),
            "draft_cost": round(draft_cost, 3),
            "judge_cost": round(judge_cost, 3),
            "predicted_speed_up": round(predicted, 3),
            "efficiency": round(ratios["speculative / plain"] / predicted, 3),
        }
        results.append(result)
    return results


def write_profile(methods: Methods, prompt: TokenIds, temperature: float, file: Path) -> None:
    """Trace one speculative run with torch.profiler, for a browser's trace viewer."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    decode = methods.by_name()["speculative"]
    with profile(activities=activities) as profiler:
        decode(prompt, temperature, 0)
    profiler.export_chrome_trace(str(file))


def predicted_speed_up(plain: SpecStats, speculative: SpecStats) -> float:
    """Time per token of plain decoding, over that of prompts, drafts, and a plain step per pass.

    Without prompts, with k draft tokens of cost c each and independent
    acceptance a, this is the formula of Leviathan et al., 2211.17192:
    (1 - a^(k+1)) / ((1 - a) (k c + 1)).
    """
    plain_step = _later_step(plain)
    before = plain.seconds["prefill"] + _num_later_steps(plain) * plain_step
    given = speculative.seconds["prefill"] + speculative.seconds["propose"]
    after = given + _num_later_steps(speculative) * plain_step
    per_token = before / plain.num_output_tokens, after / speculative.num_output_tokens
    return per_token[0] / per_token[1]


def step_costs(plain: SpecStats, speculative: SpecStats) -> tuple[float, float]:
    """Mean time of drafting, and of the target's pass including verification, in plain steps.

    The draft's reading of a prompt counts as drafting.

    A pass over the many rows of a token tree costs more than one over a single token where compute
    rather than reading the weights is the bottleneck: on a CPU.
    """
    plain_step, verifying = map(_later_step, (plain, speculative))
    drafting = speculative.seconds["propose"] / speculative.num_steps
    return drafting / plain_step, verifying / plain_step


def _later_step(stats: SpecStats) -> float:
    """Mean time of the target's part of a step, without those that also read a prompt."""
    return (stats.seconds["verify"] + stats.seconds["commit"]) / max(1, _num_later_steps(stats))


def _num_later_steps(stats: SpecStats) -> int:
    return stats.num_steps - stats.num_prompt_steps


def swi(
    stats: SpecStats, target_cost: float, *draft_costs: float, names: Sequence[str] = ()
) -> float:
    """Chen et al.'s SWI; drafters that copy cost nothing.

    Args:
        stats: counters of the runs.
        target_cost: of one pass, in any unit, such as parameters.
        draft_costs: of one pass of each draft model; for a cascade's several models, in its order;
            for early exit, of one through the target's first layers.
        names: of these models in the counters; by default draft_model_1 and so on.
    """
    passes = {**stats.num_draft_passes, "target": stats.num_steps}
    names = names or [f"draft_model_{n}" for n in range(1, len(draft_costs) + 1)]
    costs = dict(zip(names, draft_costs, strict=True))
    if len(draft_costs) < 2:
        costs = dict.fromkeys(passes, sum(draft_costs))
    costs["target"] = costs["quantized"] = target_cost  # a copy has as many parameters
    return standardized_walltime_improvement(stats.num_output_tokens, "target", passes, costs)


def describe_environment() -> dict:
    """Machine, versions and commit as plain JSON values; unknown ones are None."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": None if status is None else bool(status),
        "cpu": cpu_model(),
        "cpu_instruction_set": cpu_instruction_set(),
        "threads": torch.get_num_threads(),
        "fastspec": fastspec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_model() -> str | None:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout that this package runs from, if it is one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
