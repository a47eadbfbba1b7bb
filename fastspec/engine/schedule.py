"""How many tokens a request drafts in each step.

For a sampled request a schedule may depend on the request's own history and on fixed costs, never
on a clock or on other requests: different draft lengths use different random numbers, and the same
seed must give the same text. Greedy text is the same whatever is drafted, so for greedy requests it
may depend on the other requests in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from fastspec.engine.request import EngineRequest

_PRIOR_RATE = 0.5  # assumed acceptance rate of a new request, weighted like one token
_MEMORY = 0.9  # weight after a step of what was known before it
_GAIN_TO_CHANGE = 1.03  # gain needed to switch between two lengths
_GAIN_TO_STAY = 1.03  # over plain decoding, so that errors in the costs do little harm
_GAIN_TO_RESUME = 1.05
_FIRST_LENGTH = 2  # draft length of a new request: little is lost if drafts fail
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 128  # plain steps before drafting is tried again
_ASSUMED_COST = 0.15  # of one draft token relative to a plain step, where it must not be measured
_TRIAL_STEPS = 8  # with drafts of _FIRST_LENGTH, for a batch to learn what drafts are worth
_SETTLED = 16  # steps with drafts after which an earlier pause is forgotten


class Step(NamedTuple):
    """Draft tokens of one target pass: wanted as far as there was room, proposed, accepted.

    If a text ends within the accepted ones, proposed and accepted count only up to its end.
    """

    wanted: int
    proposed: int
    accepted: int


@runtime_checkable
class Schedule(Protocol):
    """Decides how much to draft; it may keep its state in `request.schedule_state`."""

    def num_draft_tokens(self, request: EngineRequest) -> int:
        """Return the draft tokens wanted for the request's next step, 0..num_speculative_tokens."""
        ...

    def record(self, request: EngineRequest, step: Step) -> None:
        """Record the outcome of a step."""
        ...


@dataclass
class _Pace:
    """State of one request: decayed counts of acceptance, the length in use, pauses.

    Attributes:
        owner: the schedule that it belongs to.
        costs: of steps with 0, 1, ... draft tokens, up to the request's own K.
    """

    owner: object
    costs: tuple[float, ...]
    length: int
    accepted: float = 0.0
    rejected: float = 0.0
    num_idle: int = 0
    num_steps: int = 0
    pause: int = _FIRST_PAUSE

    def rate(self, prior: float = _PRIOR_RATE) -> float:
        """Estimate the acceptance rate, given the rate `prior` assumed before the first draft."""
        return (self.accepted + prior) / (self.accepted + self.rejected + 1)

    def learn(self, step: Step) -> None:
        """Count a step, and decay the earlier ones."""
        self.accepted = _MEMORY * self.accepted + step.accepted
        self.rejected = _MEMORY * self.rejected + (step.accepted < step.proposed)


class AdaptiveSchedule:
    """Chooses the length with the most tokens per second at the recent acceptance rate, or none.

    A step with k draft tokens yields (1 - a^(k+1)) / (1 - a) tokens, where a is the acceptance rate
    of the last steps, and costs step_costs[k]. Another length must promise 3 % more than the one in
    use, drafting at all 3 % more than plain decoding, and resuming drafting 5 %. Once drafting has
    stopped, one token is tried after 32 plain steps, then after 64, and from then on after 128.

    If `batch_step_costs` are known, greedy requests that share a step draft equally many tokens,
    because a draft model reads its weights for the longest draft anyway. The length is chosen for
    their total tokens per step, new requests are assumed to be like earlier ones, and the rules
    above apply to all of them as they do to one.

    Args:
        step_costs: costs of steps with 0, 1, ..., K draft tokens, in any unit, e.g. measured times.
        sampled_step_costs: the same for requests that sample, which must not vary between runs;
            None assumes 15 % of a plain step per draft token.
        batch_step_costs: a number of requests, and the costs of steps in which each of them drafts
            0, 1, ..., K tokens, in the unit of step_costs, which are then for a single request.
    Raises:
        ValueError: fewer than two costs, or one that is not positive.

    Source: the throughput model of Yan et al., "Decoding Speculative Decoding", 2402.01528.
    """

    def __init__(
        self,
        step_costs: Sequence[float],
        sampled_step_costs: Sequence[float] | None = None,
        batch_step_costs: tuple[int, Sequence[float]] | None = None,
    ):
        if sampled_step_costs is None:
            sampled_step_costs = [1 + _ASSUMED_COST * num for num in range(len(step_costs))]
        self._greedy, self._sampled = _relative(step_costs), _relative(sampled_step_costs)
        self._alone, self._batch = step_costs, batch_step_costs
        self._shared = _new_pace(self, self._greedy)

    def common_length(self, requests: Sequence[EngineRequest]) -> int | None:
        """Return the draft length shared by the greedy requests of a step; None = each its own."""
        paces = [self._pace(r) for r in requests if r.params.temperature == 0]
        if self._batch is None or len(paces) < 2:
            return None
        shared = self._shared
        if shared.num_steps < _TRIAL_STEPS:
            shared.num_steps += 1
            return shared.length
        size, batched = self._batch
        part = (min(len(requests), size) - 1) / (size - 1)
        pairs = zip(self._alone, batched, strict=True)
        costs = _relative([alone + part * (cost - alone) for alone, cost in pairs])
        prior = shared.rate()
        gains = _speed_ups([pace.rate(prior) for pace in paces], costs)
        least = _GAIN_TO_CHANGE * gains[shared.length] if shared.length else _GAIN_TO_RESUME
        if max(gains) < _GAIN_TO_STAY:
            shared.length = 0
        elif max(gains) > least:
            shared.length, shared.num_idle = gains.index(max(gains)), 0
            shared.pause = _FIRST_PAUSE
        if shared.length:
            return shared.length
        shared.num_idle += 1
        if shared.num_idle < shared.pause:
            return 0
        shared.num_idle, shared.pause = 0, min(2 * shared.pause, _LONGEST_PAUSE)
        return 1

    def num_draft_tokens(self, request: EngineRequest) -> int:
        pace = self._pace(request)
        if pace.length == 0 and pace.num_idle >= pace.pause:
            return 1
        return pace.length

    def record(self, request: EngineRequest, step: Step) -> None:
        pace = self._pace(request)
        if step.wanted == 0:
            pace.num_idle += 1
            return
        if step.proposed == 0:  # the drafter had no proposal, which says nothing about its drafts
            return
        if request.params.temperature == 0:
            self._shared.learn(step)
        if pace.length == 0:
            _end_trial(pace, step)
        else:
            _change_length(pace, step)

    def _pace(self, request: EngineRequest) -> _Pace:
        pace = request.schedule_state
        if pace is None or pace.owner is not self:  # the request or its drafter is new
            costs = self._greedy if request.params.temperature == 0 else self._sampled
            most = _longest(request, len(costs) - 1)
            pace = request.schedule_state = _new_pace(self, costs[: most + 1])
        return pace


def _new_pace(owner: AdaptiveSchedule, costs: tuple[float, ...]) -> _Pace:
    return _Pace(owner, costs, length=min(_FIRST_LENGTH, len(costs) - 1))


def _longest(request: EngineRequest, num_speculative_tokens: int) -> int:
    """Return the most tokens a schedule may want for a request, which may have its own K."""
    own = request.params.num_speculative_tokens
    return num_speculative_tokens if own is None else min(own, num_speculative_tokens)


def _end_trial(pace: _Pace, step: Step) -> None:
    """Record a one-token trial during plain decoding; if accepted, earlier counts are outdated."""
    pace.num_idle = 0
    pace.pause = min(2 * pace.pause, _LONGEST_PAUSE)
    if step.accepted:
        pace.accepted = pace.rejected = 0.0
    pace.learn(step)
    gains = _speed_ups([pace.rate()], pace.costs)
    if max(gains) > _GAIN_TO_RESUME:
        pace.length = gains.index(max(gains))
        pace.num_steps = 0


def _change_length(pace: _Pace, step: Step) -> None:
    """Update the length in use after a step with drafts."""
    pace.num_steps += 1
    pace.learn(step)
    gains = _speed_ups([pace.rate()], pace.costs)
    if max(gains) < _GAIN_TO_STAY:
        pace.length = pace.num_idle = 0  # other steps without drafts do not count as a pause
    elif max(gains) > _GAIN_TO_CHANGE * gains[pace.length]:
        pace.length = gains.index(max(gains))
    if pace.num_steps >= _SETTLED:
        pace.pause = _FIRST_PAUSE


def _speed_ups(rates: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Return the speed-up over plain decoding of requests in one step, by draft length."""
    tokens, powers, gains = 0.0, [1.0] * len(rates), []
    for cost in costs:
        tokens += sum(powers)
        gains.append(tokens / len(rates) / cost)
        powers = [power * rate for power, rate in zip(powers, rates, strict=True)]
    return gains


def _relative(costs: Sequence[float]) -> tuple[float, ...]:
    if len(costs) < 2 or not all(0 < cost < float("inf") for cost in costs):
        raise ValueError(f"step_costs: expected two or more positive costs, got {costs!r}")
    return tuple(cost / costs[0] for cost in costs)


@dataclass(frozen=True)
class HeuristicSchedule:
    """Starts at K; two tokens more after a fully accepted draft, otherwise one less, at least 1.

    As in transformers, but never above K, for which memory is reserved: transformers grows from K
    without limit, so its drafts are longer where much is accepted.
    """

    num_speculative_tokens: int

    def num_draft_tokens(self, request: EngineRequest) -> int:
        return request.schedule_state or _longest(request, self.num_speculative_tokens)

    def record(self, request: EngineRequest, step: Step) -> None:
        if step.proposed:
            change = 2 if step.accepted == step.proposed else -1
            length = self.num_draft_tokens(request) + change
            longest = _longest(request, self.num_speculative_tokens)
            request.schedule_state = max(1, min(length, longest))


class SweepSchedule:
    """Uses the given lengths in turn, to measure them under the same conditions.

    Attributes:
        steps: those so far; at the end of a text fewer tokens than planned are wanted.
    """

    def __init__(self, lengths: Sequence[int]):
        self._lengths = tuple(lengths)
        self.steps: list[Step] = []

    def num_draft_tokens(self, request: EngineRequest) -> int:
        return self._lengths[(request.schedule_state or 0) % len(self._lengths)]

    def record(self, request: EngineRequest, step: Step) -> None:
        request.schedule_state = (request.schedule_state or 0) + 1
        self.steps.append(step)
