"""The drafter of an engine: which one is known, whether it is on, how much it proposes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import is_int, require
from fastspec.drafters import Drafter, GlideDrafter, Proposal, TreeDrafter, TreeProposer
from fastspec.drafters.base import Batch, Request, check_proposal
from fastspec.engine.outputs import StepTree
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Schedule, Step


class Speculation:
    """Proposals of the drafter that is on, or none.

    A drafter or schedule may be anybody's code. What it raises, and what it proposes against the
    protocol, becomes `error`: for the rest of the step it is off, decoding goes on plainly, and it
    begins anew in the next step with requests that it knows nothing of.
    """

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        spec: SpecConfig,
        config: EngineConfig,
    ):
        self._device = device
        self._vocab_size = vocab_size
        self._block_size = config.block_size
        self._backend = config.backend
        self._most_draft_tokens = config.max_n_spec_tokens
        self._spec = spec
        self._known: Drafter | None = None
        self._num_draft_tokens = 0
        self._has_failed = False  # in this step
        self._error: Exception | None = None
        self.drafter: Drafter | None = None
        self.schedule: Schedule | None = None

    @property
    def is_on(self) -> bool:
        return self.drafter is not None

    @property
    def known(self) -> Drafter | None:
        """The drafter that is on, or was on last."""
        return self._known

    @property
    def knows_glide(self) -> bool:
        known = self._known.draft if isinstance(self._known, TreeDrafter) else self._known
        return isinstance(known, GlideDrafter)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a request that one step can accept at most."""
        return self._num_draft_tokens if self.is_on else 0

    @property
    def num_nodes(self) -> int:
        """Nodes of a request's tree at most; 0 for a drafter that proposes K tokens at most."""
        if isinstance(self.drafter, TreeProposer):
            return self.drafter.num_nodes(self._num_draft_tokens)
        return 0

    @property
    def has_error(self) -> bool:
        """Whether take_error() has one to give."""
        return self._error is not None

    def take_error(self) -> Exception | None:
        """The first error since the last call, once."""
        error, self._error = self._error, None
        return error

    def check_count(self, name: str, value: int) -> None:
        """Refuse a number of draft tokens that is none, or more than the engine allows."""
        require(name, value, is_int(value) and value >= 1, "an int >= 1")
        most = self._most_draft_tokens
        fits = most is None or value <= most
        require(name, value, fits, f"at most max_n_spec_tokens, {most}")

    def enable(
        self,
        drafter: Drafter,
        num_draft_tokens: int,
        schedule: Schedule | None,
        running: list[EngineRequest],
    ) -> None:
        """Turn on a drafter; ValueError, and no change, when it cannot propose so many tokens."""
        if isinstance(drafter, TreeProposer):
            drafter.num_nodes(num_draft_tokens)
        self.disable(running)
        self._known = self.drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self.schedule = schedule

    def disable(self, running: list[EngineRequest]) -> None:
        """Decode plainly; the drafter stays known."""
        self.release(running)
        self.drafter = None

    def clear(self, running: list[EngineRequest]) -> None:
        """Decode plainly and let the drafter go."""
        self.disable(running)
        self._known = None

    def propose(self, requests: list[EngineRequest]) -> tuple[Batch, Proposal]:
        """The next step of some requests, and what the target is to judge in it."""
        self._has_failed = False
        with self._guarded(requests):
            batch = self._batch(requests, self._limits(requests))
            if self.drafter is not None and any(batch.num_draft_tokens):
                proposal = self.drafter.propose(batch)
                check_proposal(proposal, batch, self._vocab_size)
                self._check_rule(proposal)
                if (on_judged := proposal.on_judged) is None:
                    return batch, proposal
                return batch, replace(proposal, on_judged=self._guarded_call(on_judged, requests))
        batch = self._batch(requests, [0] * len(requests))
        shape = len(requests), batch.num_speculative_tokens
        return batch, Proposal(torch.full(shape, -1, dtype=torch.int32, device=self._device))

    def writers(
        self, proposal: Proposal, index: int, tree: StepTree | None
    ) -> Sequence[str | None]:
        """Who wrote each token of one request's chain, or of the accepted path of its tree."""
        if proposal.writers is None:
            name = self.drafter.name if self.drafter is not None else None
            return [name] * proposal.token_ids.shape[1]
        of_each = proposal.writers[index]
        return of_each if tree is None else [of_each[node - 1] for node in tree.path]

    def record(self, request: EngineRequest, step: Step) -> None:
        """Tell the schedule what became of a request's draft."""
        if self.schedule is not None and self.is_on and not self._has_failed:
            with self._guarded([request]):
                self.schedule.record(request, step)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Tell the drafter what was kept of its last proposal."""
        if self.drafter is not None and not self._has_failed:
            with self._guarded(batch.requests):
                self.drafter.commit(batch, accepted)

    def release(self, requests: Sequence[Request]) -> None:
        """Let the drafter forget requests that have ended or lost their blocks."""
        if self.drafter is None:
            return
        for request in requests:
            with self._guarded(()):
                self.drafter.release(request)

    def _batch(self, requests: list[EngineRequest], num_draft_tokens: list[int]) -> Batch:
        return Batch(requests, num_draft_tokens, self.num_draft_tokens, self._device, self._backend)

    def _limits(self, requests: list[EngineRequest]) -> list[int]:
        """What is wanted of each request's draft; a tree may fill its blocks."""
        if not (num_nodes := self.num_nodes):
            return [min(self._wanted(request), request.room) for request in requests]
        free = [len(r.block_table) * self._block_size - len(r.token_ids) for r in requests]
        return [
            min(num_nodes, slots) if request.room else 0
            for request, slots in zip(requests, free, strict=True)
        ]

    def _check_rule(self, proposal: Proposal) -> None:
        """Refuse trees where the rule of acceptance is one for chains."""
        for name, exact in (("rejection_sample_method", "standard"), ("relaxed_acceptance", 1)):
            value = getattr(self._spec, name)
            if proposal.parents is not None and value != exact:
                raise ValueError(f"{name}: {value!r} judges chains, not token trees")

    def _wanted(self, request: EngineRequest) -> int:
        """Tokens proposed for a request in its next step, if there is room for them."""
        if self.schedule is None or not self.is_on:
            return self.num_draft_tokens
        wanted = self.schedule.num_draft_tokens(request)
        require("num_draft_tokens", wanted, is_int(wanted) and wanted >= 0, "an int >= 0")
        return min(wanted, self.num_draft_tokens)

    @contextmanager
    def _guarded(self, requests: Sequence[Request]) -> Iterator[None]:
        """Keep what is raised inside as the error, and let the drafter forget the requests.

        An interrupt goes on; it too leaves a drafter that knows nothing of them.
        """
        try:
            yield
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, Exception):
                self._error = self._error or error
            for request in requests:
                self.release([request])
            if not isinstance(error, Exception):
                raise

    def _guarded_call(self, call: Callable[..., None], requests: list[EngineRequest]) -> Callable:
        def guarded(*args) -> None:
            with self._guarded(requests):
                call(*args)

        return guarded
