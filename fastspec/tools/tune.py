"""The best drafter and its number of tokens, measured on the user's machine, model and prompts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.k_matrix import KMatrix
from fastspec.config.methods import method_named
from fastspec.drafters.context import DrafterSource
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.schedule import SweepSchedule
from fastspec.engine.stats import SpecStats
from fastspec.tools.formulas import expected_tokens, throughput
from fastspec.tools.simulate import Simulator
from fastspec.tools.stored_outputs import StoredOutput

_TRIMMED = 0.1  # share of the slowest steps that is left out: the machine was doing something else
_LEAST_GAIN = 1.02  # predicted over plain decoding, below which plain decoding is chosen
_HALVINGS = 20  # of the interval in which an acceptance rate is looked for

# What the target asks for: tokens of every draft model, and of MaG.
_HORIZONTAL = ((1, 10), (1, 14), (2, 10), (3, 4))
_REVIEWED, _COPIED = 6, 8  # tokens that the first draft model reviews at least, and MaG's pieces

TokenIds = list[int]


def k_matrices_to_try(num_models: int) -> list[KMatrix]:
    """The k_matrices of cascades with MaG last: horizontal ones, and one vertical.

    In the vertical one each draft model reviews at least half as many tokens as the one before it.
    """
    size = num_models + 1
    nothing = ((0,) * size,) * num_models
    horizontal = [((num,) * num_models + (copied,), *nothing) for num, copied in _HORIZONTAL]
    diagonal = [max(1, _REVIEWED >> level) for level in range(num_models)]
    rows = [
        (*[0] * level, num, *[0] * (num_models - level - 1), _COPIED)
        for level, num in enumerate(diagonal)
    ]
    return [*horizontal, (*rows, (0,) * num_models + (_COPIED,))]


@dataclass
class Measurement:
    """Costs and gains of one drafter, by the number k of its draft tokens.

    Attributes:
        spec: the drafter; its num_speculative_tokens is the largest k, and the only one besides 0
            if its proposals have a fixed shape: cascades, trees, and copies first.
        draft_seconds: of proposing k tokens, by k; includes the host's time.
        verify_seconds: of the target's pass over the proposal and one more token, and of the rest
            of the step, by k.
        tokens_per_pass: mean tokens of a step with k draft tokens, by k.
        start_seconds: of reading a prompt, by the target only and by both models.
    """

    spec: SpecConfig
    draft_seconds: dict[int, float] = field(default_factory=dict)
    verify_seconds: dict[int, float] = field(default_factory=dict)
    tokens_per_pass: dict[int, float] = field(default_factory=dict)
    start_seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def lengths(self) -> list[int]:
        """The k that were measured, 0 first."""
        return sorted(self.draft_seconds)

    def step_seconds(self, length: int) -> float:
        """Seconds of a step with k draft tokens."""
        return self.draft_seconds[length] + self.verify_seconds[length]

    def reading_seconds(self, first_lap: Mapping[str, float], length: int) -> float:
        """Seconds by which the target's part of a first step is longer than that of another."""
        taken = sum(first_lap[phase] for phase in ("prefill", "verify", "commit"))
        return max(0.0, taken - self.verify_seconds[length])

    def tokens_per_second(self, length: int) -> float:
        """Predicted by the throughput model, without prompts."""
        tokens = self.tokens_per_pass[length]
        return throughput(tokens, self.draft_seconds[length], self.verify_seconds[length])

    def speed_up(self, length: int, num_tokens: int) -> float:
        """Predicted speed-up over plain decoding for texts of num_tokens, including prompts."""
        plain, both = self.start_seconds
        before = plain + num_tokens * self.step_seconds(0)
        after = (both if length else plain) + num_tokens / self.tokens_per_second(length)
        return before / after

    def draft_cost(self) -> float:
        """Cost of one draft token in steps of plain decoding, in chains of the largest k."""
        most = self.lengths[-1]
        return self.draft_seconds[most] / most / self.step_seconds(0)

    def rate_for(self, gain: float, num_tokens: int) -> tuple[float, int] | None:
        """The lowest acceptance rate that predicts this speed-up, and the k that reaches it.

        From the costs only: each draft token is assumed to be accepted at that rate if those before
        it were (`formulas.expected_tokens`). None if no rate is enough.
        """

        def best(rate: float) -> tuple[float, int]:
            tokens = {length: expected_tokens(rate, length) for length in self.lengths}
            assumed = replace(self, tokens_per_pass=tokens)
            return max((assumed.speed_up(k, num_tokens), k) for k in self.lengths if k)

        low, high = 0.0, 1.0
        if best(high)[0] < gain:
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if best(middle)[0] >= gain else (middle, high)
        return high, best(high)[1]


@dataclass(frozen=True)
class Plan:
    """The choice: a drafter with k tokens, or plain decoding (method "none").

    Attributes:
        spec: what to run.
        predicted: its speed-up over plain decoding, according to the model.
    """

    spec: SpecConfig
    predicted: float


class Planner:
    """Runs a target with several drafters, one prompt at a time, ends of text ignored.

    Args:
        target: the loaded model.
        tokenizer: of the target; None if the prompts are ids.
        prompts: texts or ids, one or more.
        max_tokens: new tokens per prompt.
        temperature: of the runs; acceptance rates at 0 differ from those above it.
        config: device, dtype and cache; without its prefix caching, as prompts are repeated and
            reading them is part of what is measured.
        advance: called after each prompt of a run.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: Sequence[str | TokenIds],
        max_tokens: int,
        temperature: float = 0.0,
        config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        advance: Callable[[], None] = lambda: None,
    ):
        self._target = target
        self._tokenizer = tokenizer
        self._prompts, self._advance = prompts, advance
        self._config = replace(config, max_batch_size=1, prefix_caching=False)
        self.max_tokens = max_tokens
        self._params = SamplingParams(
            temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True
        )

    def measure(self, spec: SpecConfig, drafter: DrafterSource | None) -> Measurement:
        """Time and count a drafter with 0, 1, ..., K tokens.

        Times of steps with drafts come from decoding all prompts while the number of draft tokens
        changes from step to step, those of steps without from an engine without a drafter, which
        decodes the same prompts in turn. With one number throughout, other tokens would be
        accepted, because a step begins where the one before it ended: greedy texts, which do not
        depend on the drafts, are drafted again for each number (see `tools.simulate`); others are
        decoded again, as are those of drafters that read more of the target. Cascades, trees and
        drafts with copies first, whose steps vary, are measured only with 0 and K, as the means of
        whole texts.

        Raises:
            ValueError: a prompt, drafter or option that cannot be used, or too few tokens to
                measure each length twice.
        """
        if has_own_shape(spec):
            return self._measured_whole(spec, drafter)
        measurement, outputs = self.measure_costs(spec, drafter)
        measurement.tokens_per_pass = {
            length: self._mean_tokens(spec, drafter, outputs, length) if length else 1.0
            for length in measurement.lengths
        }
        return measurement

    def measure_costs(
        self, spec: SpecConfig, drafter: DrafterSource | None
    ) -> tuple[Measurement, list[RequestOutput]]:
        """The costs of chains, without their gains, which an untrained draft model cannot show; and
        the texts that were written meanwhile.

        Raises:
            ValueError: as `measure` does.
        """
        lengths = range(1, spec.num_draft_tokens() + 1)
        schedule = SweepSchedule(lengths)
        engine = self._engine(replace(spec, schedule=schedule, step_costs=None), drafter)
        self._warm_up(self._plain)
        self._warm_up(engine)
        schedule.steps.clear()
        measurement = Measurement(spec)
        samples: dict[int, list[_Sample]] = {length: [] for length in (0, *lengths)}
        outputs: list[RequestOutput] = []
        starts: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []
        for prompt in self._prompts:
            plain_laps, _ = self._run(self._plain, prompt)
            samples[0] += [_Sample.of(lap, False) for lap in plain_laps[1:]]
            laps, output = self._run(engine, prompt)
            outputs.append(output)
            steps, schedule.steps = schedule.steps, []
            if len(steps) < 2:
                raise ValueError(
                    f"max_tokens: {self.max_tokens} is too few to measure; use a larger value"
                )
            drafting_laps = laps[-len(steps) :]  # those after a plain start, if there was one
            starts.append((plain_laps[0], laps[0], drafting_laps[0]))
            for index, (step, lap) in enumerate(zip(steps, drafting_laps, strict=True)):
                if index == 0 or step.wanted != lengths[index % len(lengths)]:
                    continue  # the draft reads the prompt, or the text ends
                samples[step.wanted].append(_Sample.of(lap, step.proposed > 0))
            self._advance()
        for length, timed in samples.items():
            if len(timed) < 2:
                raise ValueError(
                    f"max_tokens: {self.max_tokens} is too few: each draft length must be timed at"
                    " least twice; use a larger value or more prompts"
                )
            drafting, verifying = _typical(timed)
            measurement.draft_seconds[length] = drafting
            measurement.verify_seconds[length] = verifying
        alone = statistics.mean(measurement.reading_seconds(plain, 0) for plain, _, _ in starts)
        both = statistics.mean(
            measurement.reading_seconds(first, 1)
            + max(0.0, drafting["propose"] - measurement.draft_seconds[1])
            for _, first, drafting in starts
        )
        measurement.start_seconds = (alone, both)
        return measurement, outputs

    def _measured_whole(self, spec: SpecConfig, drafter: DrafterSource | None) -> Measurement:
        """The means of plain and of drafted steps, with all prompts decoded both ways in turn."""
        engines = {
            0: self._plain,
            spec.num_model_tokens(): self._engine(spec, drafter),
        }
        runs: dict[int, list[tuple[list[dict[str, float]], RequestOutput]]] = {}
        for engine in engines.values():
            self._warm_up(engine)
        for prompt in self._prompts:
            for length, engine in engines.items():
                runs.setdefault(length, []).append(self._run(engine, prompt))
            self._advance()
        measurement, starts = Measurement(spec), []
        for length, texts in runs.items():
            # A drafter that reads the target reads the prompt in the step after the target's.
            num_first = 1 + getattr(engines[length].drafter, "reads_target", False)
            laps = [lap for laps, _ in texts for lap in laps[num_first:]]
            if not laps:
                raise ValueError(
                    f"max_tokens: {self.max_tokens} is too few to measure; use a larger value"
                )
            drafting = statistics.mean(lap["propose"] for lap in laps)
            verifying = statistics.mean(lap["verify"] + lap["commit"] for lap in laps)
            measurement.draft_seconds[length] = drafting
            measurement.verify_seconds[length] = verifying
            starts.append(
                statistics.mean(
                    measurement.reading_seconds(laps[0], length)
                    + max(0.0, max(lap["propose"] for lap in laps[:num_first]) - drafting)
                    for laps, _ in texts
                )
            )
            counts = SpecStats.total(output.stats for _, output in texts)
            measurement.tokens_per_pass[length] = counts.num_output_tokens / counts.num_steps
        measurement.start_seconds = (starts[0], starts[1])
        return measurement

    def choose(self, measurements: Sequence[Measurement]) -> Plan:
        """The drafter and k with the largest predicted speed-up; plain decoding if below 2 %."""
        options = [
            (measurement.speed_up(length, self.max_tokens), index, length)
            for index, measurement in enumerate(measurements)
            for length in measurement.lengths
            if length
        ]
        predicted, index, length = max(options)
        if predicted < _LEAST_GAIN:
            return Plan(SpecConfig("none"), 1.0)
        return Plan(_with_length(measurements[index].spec, length), predicted)

    def confirm(self, plan: Plan, drafter: DrafterSource | None, repeats: int) -> float:
        """The measured speed-up of a plan: plain and chosen runs interleaved, median of rounds."""
        engines = [self._plain, self._engine(plan.spec, drafter)]
        for engine in engines:
            self._warm_up(engine)
        seconds: list[list[float]] = [[0.0] * repeats for _ in engines]
        for round_index in range(repeats):
            for prompt in self._prompts:
                for index, engine in enumerate(engines):
                    start = time.perf_counter()
                    engine.generate(prompt, self._params)
                    seconds[index][round_index] += time.perf_counter() - start
                self._advance()
        return statistics.median(seconds[0]) / statistics.median(seconds[1])

    @cached_property
    def _plain(self) -> Engine:
        return self._engine(SpecConfig("none"), None)

    def _engine(self, spec: SpecConfig, drafter: DrafterSource | None) -> Engine:
        spec = spec.for_repeated_prompts()
        return Engine(self._target, drafter, self._tokenizer, spec, self._config)

    def _warm_up(self, engine: Engine) -> None:
        params = replace(self._params, max_tokens=min(8, self.max_tokens))
        engine.generate(self._prompts[0], params)

    def _run(
        self, engine: Engine, prompt: str | TokenIds
    ) -> tuple[list[dict[str, float]], RequestOutput]:
        """Seconds of the phases of each step, and the finished output."""
        engine.add_request(prompt, self._params)
        laps = []
        while True:
            before = dict(engine.stats.seconds)
            while not (events := engine.step()):
                pass  # a long prompt is read in several rounds
            after = engine.stats.seconds
            laps.append({phase: after[phase] - before[phase] for phase in after})
            output = events[-1].output
            if output is not None and output.error is not None:
                raise ValueError(f"target: {output.error}")
            if output is not None:
                return laps, output

    def _mean_tokens(
        self,
        spec: SpecConfig,
        drafter: DrafterSource | None,
        outputs: list[RequestOutput],
        length: int,
    ) -> float:
        """Mean tokens per step if each step has that many draft tokens."""
        spec, params = _with_length(spec, length).for_repeated_prompts(), self._params
        is_decoder = not self._target.config.is_encoder_decoder
        if params.temperature == 0 and is_decoder and not spec.reads_target:
            vocab_size = self._target.config.get_text_config(decoder=True).vocab_size
            simulator = Simulator(self._target, drafter, vocab_size, None, spec, self._config)
            simulator.run(
                [StoredOutput(list(o.prompt_token_ids), list(o.token_ids), params) for o in outputs]
            )
            stats = simulator.stats
        else:
            engine = self._engine(spec, drafter)
            engine.generate([list(o.prompt_token_ids) for o in outputs], params)
            stats = engine.stats
        return stats.num_output_tokens / stats.num_steps


def has_own_shape(spec: SpecConfig) -> bool:
    """Whether proposals are not chains that can have any length, see `Measurement.spec`."""
    is_shaped = method_named(spec.method).sets_length or spec.drafts_trees
    return is_shaped or spec.suffix_tokens is not None


def _with_length(spec: SpecConfig, length: int) -> SpecConfig:
    return spec if has_own_shape(spec) else replace(spec, num_speculative_tokens=length)


class _Sample(NamedTuple):
    """Seconds of one step, and whether anything was proposed in it."""

    drafting: float
    verifying: float
    has_drafts: bool

    @classmethod
    def of(cls, lap: dict[str, float], has_drafts: bool) -> "_Sample":
        return cls(lap["propose"], lap["verify"] + lap["commit"], has_drafts)


def _typical(samples: list[_Sample]) -> tuple[float, float]:
    """Seconds of drafting and of verifying: the means of all but the slowest.

    Steps with drafts and steps without are trimmed apart, as a drafter that copies may have few of
    the former, and they take longer.
    """
    drafting = verifying = 0.0
    for kind in (True, False):
        own = [each for each in samples if each.has_drafts is kind]
        if own:
            share = len(own) / len(samples)
            drafting += share * _trimmed_mean([each.drafting for each in own])
            verifying += share * _trimmed_mean([each.verifying for each in own])
    return drafting, verifying


def _trimmed_mean(seconds: list[float]) -> float:
    """The mean of all but the slowest."""
    kept = sorted(seconds)[: max(1, round(len(seconds) * (1 - _TRIMMED)))]
    return statistics.mean(kept)
