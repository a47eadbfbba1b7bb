"""Makes the draft schedule of an engine from step costs, which are measured once."""

import time
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from statistics import median
from uuid import uuid4

import torch

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Drafter, Proposal, TreeProposer
from fastspec.drafters.base import Batch, PartlyScheduled
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.schedule import AdaptiveSchedule, HeuristicSchedule, Schedule
from fastspec.engine.verify import prefill, verify
from fastspec.models.runner import ModelRunner

_ROUNDS = 6  # the first warms up; the fastest of the others counts
_BATCH_SIZE = 8  # size of the batch whose steps are measured
_LEAST_SLOPE = 0.01  # fraction of a plain step, per draft token


@dataclass(eq=False)
class Pacer:
    """Makes the schedule that spec.schedule names for a drafter and its K.

    Costs are measured on steps of synthetic requests: one, and a batch of 8, or fewer if the engine
    allows no more.
    """

    spec: SpecConfig
    runner: ModelRunner
    block_manager: BlockManager
    factory: RequestFactory
    config: EngineConfig
    _measured: AdaptiveSchedule | None = field(default=None, init=False)
    _measured_of: tuple[Drafter, int] | None = field(default=None, init=False)

    def schedule(self, drafter: Drafter, num_speculative_tokens: int) -> Schedule | None:
        """Return the schedule; None = always K. For a `PartlyScheduled` drafter, its model's.

        Raises:
            ValueError: the drafter proposes token trees, step_costs do not fit K, or the cache has
                no room to measure them.
        """
        if self.spec.schedule == "constant":
            return None
        if isinstance(drafter, TreeProposer):
            raise ValueError("schedule: expected 'constant' for token trees")
        if isinstance(self.spec.schedule, Schedule):
            return self.spec.schedule
        if isinstance(drafter, PartlyScheduled):
            num_speculative_tokens = min(num_speculative_tokens, drafter.num_model_tokens)
            drafter = drafter.model
        if self.spec.schedule == "heuristic":
            return HeuristicSchedule(num_speculative_tokens)
        given = self.spec.step_costs
        if given is not None and len(given) != num_speculative_tokens + 1:
            raise ValueError(
                f"step_costs: {len(given)} costs cover up to {len(given) - 1} draft tokens, but"
                f" {num_speculative_tokens} were requested"
            )
        if given is not None:
            return AdaptiveSchedule(given, given)
        if self._measured_of != (drafter, num_speculative_tokens):
            _, alone = self._measure(drafter, num_speculative_tokens, 1)
            most = min(_BATCH_SIZE, self.config.max_batch_size)
            size, seconds = self._measure(drafter, num_speculative_tokens, most)
            # Not fitted by a line: rows of a batch cost more as the processor fills up.
            rising = [*accumulate(reversed(seconds), min)][::-1]
            of_batch = (size, rising) if size > 1 else None
            self._measured = AdaptiveSchedule(fitted_line(alone), None, of_batch)
            self._measured_of = (drafter, num_speculative_tokens)
        return self._measured

    def forget(self) -> None:
        """Forget the measured drafter and its costs."""
        self._measured = self._measured_of = None

    @torch.inference_mode()
    def _measure(
        self, drafter: Drafter, num_speculative_tokens: int, most: int
    ) -> tuple[int, list[float]]:
        """Measure steps of up to `most` requests: their number, and seconds with 0, ..., K tokens.

        Raises:
            ValueError: no cache blocks are free for them.
        """
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_speculative_tokens + 1)
        requests: list[EngineRequest] = []
        names = (f"step-costs-{uuid4().hex}" for _ in range(most))  # that no user's request has
        for name in names:
            try:
                (request,) = self.factory.build([0, 0], params, name)
            except ValueError as error:
                what = "'adaptive' must measure steps, which max_model_len leaves no room for"
                raise ValueError(f"schedule: {what}; pass step_costs") from error
            length = len(request.token_ids) + num_speculative_tokens
            if not self.block_manager.reserve(request.block_table, length):
                break
            requests.append(request)
        if not requests:
            raise ValueError(
                "schedule: 'adaptive' must measure steps, but the cache has no room for that now;"
                " pass step_costs"
            )
        try:
            prefill(self.runner, requests, sum(len(request.token_ids) for request in requests))
            seconds = [float("inf")] * (num_speculative_tokens + 1)
            for round_index in range(_ROUNDS):
                for num_draft in range(num_speculative_tokens + 1):
                    taken = self._time_step(requests, drafter, num_draft)
                    if round_index:
                        seconds[num_draft] = min(seconds[num_draft], taken)
            ranks = self.runner.paged_model.ranks
            return len(requests), seconds if ranks is None else ranks.all_reduce_min(seconds)
        finally:
            for request in requests:
                drafter.release(request)
                self.block_manager.release(request)

    def _time_step(self, requests: list[EngineRequest], drafter: Drafter, num_draft: int) -> float:
        """Time one step; whatever is proposed, the target reads `num_draft` tokens per request."""
        device, num = self.runner.device, [num_draft] * len(requests)
        batch = Batch(requests, num, num, num_draft, device, self.config.backend)
        shape = len(requests), num_draft
        token_ids = torch.zeros(shape, dtype=torch.int32, device=batch.device)
        start = time.perf_counter()
        if num_draft:
            drafter.propose(batch)
        verify(self.runner, batch, Proposal(token_ids))
        seconds = time.perf_counter() - start
        drafter.commit(batch, [0] * len(requests))
        return seconds


def fitted_line(seconds: list[float]) -> list[float]:
    """Fit a rising line to measured values, some of which may be outliers; return its values.

    Source: the median of pairwise slopes of Theil, 1950, and Sen, JASA 63, 1968.
    """
    points = list(enumerate(seconds))
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(points, 2)]
    slope = max(median(slopes), _LEAST_SLOPE * min(seconds))
    start = median(value - slope * index for index, value in points)
    start = max(start, min(seconds) / 2)  # keeps costs positive, however steep the line
    return [start + slope * index for index in range(len(seconds))]
