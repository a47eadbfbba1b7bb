"""The drafter of an engine: which one is known, whether it is on, how much it proposes."""

from collections.abc import Sequence

import torch

from fastspec.config.checks import is_int, require
from fastspec.drafters import Drafter, GlideDrafter, Proposal, TreeDrafter, TreeProposer
from fastspec.economics.formulas import Step
from fastspec.economics.schedule import Schedule
from fastspec.outputs import StepTree
from fastspec.request import Batch, Request


class Speculation:
    """Proposals of the drafter that is on, or none."""

    def __init__(
        self, drafter: Drafter | None, num_draft_tokens: int, most_draft_tokens: int | None = None
    ):
        self._most_draft_tokens = most_draft_tokens
        self.check_count("num_speculative_tokens", num_draft_tokens)
        self._known = drafter
        self.drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self.schedule: Schedule | None = None

    @property
    def is_on(self) -> bool:
        return self.drafter is not None

    @property
    def has_known_drafter(self) -> bool:
        return self._known is not None

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

    def batch(
        self, requests: list[Request], block_size: int, device: torch.device, backend: str
    ) -> Batch:
        """The next step of requests, with what is wanted for each; a tree may fill its blocks."""
        if num_nodes := self.num_nodes:
            slots = [len(r.block_table) * block_size - len(r.token_ids) for r in requests]
            limits = [
                min(num_nodes, free) if request.room else 0
                for request, free in zip(requests, slots, strict=True)
            ]
        else:
            limits = [min(self._wanted(request), request.room) for request in requests]
        return Batch(requests, limits, self.num_draft_tokens, device, backend)

    def record(self, request: Request, step: Step) -> None:
        """Tell the schedule what became of a request's draft."""
        if self.schedule is not None and self.is_on:
            self.schedule.record(request, step)

    def writers(
        self, proposal: Proposal, index: int, tree: StepTree | None
    ) -> Sequence[str | None]:
        """Who wrote each token of one request's chain, or of the accepted path of its tree."""
        if proposal.writers is None:
            name = self.drafter.name if self.drafter is not None else None
            return [name] * proposal.token_ids.shape[1]
        of_each = proposal.writers[index]
        return of_each if tree is None else [of_each[node - 1] for node in tree.path]

    def check_count(self, name: str, value: int) -> None:
        """Refuse a number of draft tokens that is none, or more than the engine allows."""
        require(name, value, is_int(value) and value >= 1, "an int >= 1")
        most = self._most_draft_tokens
        fits = most is None or value <= most
        require(name, value, fits, f"at most max_n_spec_tokens, {most}")

    def enable(
        self, drafter: Drafter | None, num_draft_tokens: int, running: list[Request]
    ) -> None:
        """Turn on a drafter, or the known one; ValueError when it cannot propose so many tokens."""
        known = drafter if drafter is not None else self._known
        if isinstance(known, TreeProposer):
            known.num_nodes(num_draft_tokens)
        self.disable(running)
        self._known = known
        self.drafter = self._known
        self._num_draft_tokens = num_draft_tokens

    def disable(self, running: list[Request]) -> None:
        """Decode plainly; the drafter stays known."""
        self.release(running)
        self.drafter = None

    def clear(self, running: list[Request]) -> None:
        """Decode plainly and let the drafter go."""
        self.disable(running)
        self._known = None

    def propose(self, batch: Batch) -> Proposal:
        """What the target is to judge in this step."""
        if self.drafter is None or not any(batch.num_draft_tokens):
            shape = (len(batch.requests), batch.num_speculative_tokens)
            return Proposal(torch.full(shape, -1, dtype=torch.int32, device=batch.device))
        return self.drafter.propose(batch)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Tell the drafter what was kept of its last proposal."""
        if self.drafter is not None:
            self.drafter.commit(batch, accepted)

    def release(self, requests: list[Request]) -> None:
        """Let the drafter forget requests that have ended or lost their blocks."""
        if self.drafter is not None:
            for request in requests:
                self.drafter.release(request)

    def _wanted(self, request: Request) -> int:
        """Tokens proposed for a request in its next step, if there is room for them."""
        if self.schedule is None or not self.is_on:
            return self.num_draft_tokens
        return min(self.schedule.num_draft_tokens(request), self.num_draft_tokens)
