"""The schedule of an engine, with the costs of its steps, which are measured once."""

import time
from itertools import combinations
from statistics import median

import torch

from fastspec.config import SamplingParams, SpecConfig
from fastspec.drafters import Drafter, Proposal, TreeProposer
from fastspec.drafters.base import Batch
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.schedule import AdaptiveSchedule, Schedule
from fastspec.engine.verify import prefill, verify
from fastspec.models.runner import ModelRunner

_ROUNDS = 6  # the first warms up; of the others the fastest counts
_LEAST_SLOPE = 0.01  # of a plain step, for each draft token


class Pacer:
    """Makes the schedule that spec.schedule names for a drafter and its K.

    Costs are those of steps of one request that is made up for it.
    """

    def __init__(
        self,
        spec: SpecConfig,
        runner: ModelRunner,
        block_manager: BlockManager,
        factory: RequestFactory,
        backend: str,
    ):
        self._spec = spec
        self._runner = runner
        self._block_manager = block_manager
        self._factory = factory
        self._backend = backend
        self._measured: list[float] = []
        self._measured_of: tuple[Drafter, int] | None = None

    def schedule(self, drafter: Drafter, num_speculative_tokens: int) -> Schedule | None:
        """None = always K.

        Raises:
            ValueError: a drafter of token trees, there are no costs for that K, or no room to
                measure them.
        """
        if self._spec.schedule == "constant":
            return None
        if isinstance(drafter, TreeProposer):
            raise ValueError("schedule: expected 'constant' for token trees")
        if isinstance(self._spec.schedule, Schedule):
            return self._spec.schedule
        given = self._spec.step_costs
        if given is not None and len(given) != num_speculative_tokens + 1:
            raise ValueError(
                f"step_costs: there are {len(given)}, for up to {len(given) - 1} draft tokens, and"
                f" {num_speculative_tokens} are asked for"
            )
        if given is not None:
            return AdaptiveSchedule(given, given)
        if self._measured_of != (drafter, num_speculative_tokens):
            self._measured = self._measure(drafter, num_speculative_tokens)
            self._measured_of = (drafter, num_speculative_tokens)
        return AdaptiveSchedule(self._measured)

    @torch.inference_mode()
    def _measure(self, drafter: Drafter, num_speculative_tokens: int) -> list[float]:
        """Seconds of steps with 0, 1, ..., K draft tokens, interleaved, on a line through them.

        Raises:
            ValueError: no blocks are free for it.
        """
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_speculative_tokens + 1)
        (request,) = self._factory.build([0], params, "step-costs")
        length = len(request.token_ids) + num_speculative_tokens
        if not self._block_manager.reserve(request.block_table, length):
            raise ValueError(
                "schedule: 'adaptive' measures steps first, and the cache has no room for that now;"
                " pass step_costs"
            )
        try:
            prefill(self._runner, [request], len(request.token_ids))
            seconds = [float("inf")] * (num_speculative_tokens + 1)
            for round_index in range(_ROUNDS):
                for num_draft in range(num_speculative_tokens + 1):
                    taken = self._time_step(request, drafter, num_draft)
                    if round_index:
                        seconds[num_draft] = min(seconds[num_draft], taken)
            return fitted_line(seconds)
        finally:
            drafter.release(request)
            self._block_manager.release(request)

    def _time_step(self, request: EngineRequest, drafter: Drafter, num_draft: int) -> float:
        """One step; whatever was proposed, the target reads that many tokens."""
        device, num = self._runner.device, [num_draft]
        batch = Batch([request], num, num, num_draft, device, self._backend)
        token_ids = torch.zeros((1, num_draft), dtype=torch.int32, device=batch.device)
        start = time.perf_counter()
        if num_draft:
            drafter.propose(batch)
        verify(self._runner, batch, Proposal(token_ids))
        seconds = time.perf_counter() - start
        drafter.commit(batch, [0])
        return seconds


def fitted_line(seconds: list[float]) -> list[float]:
    """The values of a rising line through measured ones, of which some may be far off.

    Source: the median of pairwise slopes of Theil, 1950, and Sen, JASA 63, 1968.
    """
    points = list(enumerate(seconds))
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(points, 2)]
    slope = max(median(slopes), _LEAST_SLOPE * min(seconds))
    start = median(value - slope * index for index, value in points)
    start = max(start, min(seconds) / 2)  # a cost is positive, however steep the line
    return [start + slope * index for index in range(len(seconds))]
