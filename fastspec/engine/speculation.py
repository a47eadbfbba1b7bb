"""One drafter of an engine: whether it is on, and how much it proposes per request."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import is_int, require, require_int
from fastspec.config.k_matrix import MAX_DRAFT_TOKENS
from fastspec.drafters import Drafter, Proposal, TreeProposer
from fastspec.drafters.base import Batch, NoDrafter, PartlyScheduled, Request, check_proposal
from fastspec.engine.acceptance import reads_draft_logits, usable_drafts
from fastspec.engine.pacing import Pacer
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import AdaptiveSchedule, Schedule, Step


class Speculation:
    """Runs one drafter, which may be off, and keeps its errors away from the requests.

    A drafter or schedule may be third-party code. Whatever it raises, and a proposal that breaks
    the protocol, becomes `error`: that pass decodes plainly, and in the next one the drafter starts
    again without any memory of its requests.

    Args:
        chains_only: the start of an error message if the target cannot verify trees, else None.
        pacer: makes the schedules; None = always K.
    Attributes:
        spec: how the target verifies proposals.
        usual_num_speculative_tokens: default K.
        last_drafter: the current drafter, or the last one while off.
        num_speculative_tokens: maximum number of accepted tokens per request and step; 0 while off.
        max_nodes: maximum nodes of a request's tree; 0 if the drafter proposes chains, or is off.
        error: the first error that has not been reported yet.
    """

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        spec: SpecConfig,
        config: EngineConfig,
        chains_only: str | None = None,
        pacer: Pacer | None = None,
    ):
        self._device = device
        self._vocab_size = vocab_size
        self.is_coupled = spec.rejection_sample_method == "coupled"
        self._pacer = pacer
        self._chain_rule = chains_only or _chain_rule(spec)
        self._config = config
        self.spec = spec
        self.usual_num_speculative_tokens = spec.num_draft_tokens(config.max_n_spec_tokens)
        self._no_drafter = NoDrafter()
        self._has_failed = False  # in this step
        self.drafter: Drafter = self._no_drafter
        self.last_drafter: Drafter | None = None
        self.num_speculative_tokens = 0
        self.max_nodes = 0
        self.schedule: Schedule | None = None
        self.error: Exception | None = None

    @property
    def is_on(self) -> bool:
        return self.drafter is not self._no_drafter

    def check_count(self, name: str, value: int) -> None:
        """Raise ValueError for a number of draft tokens that is invalid or above the limit."""
        fits = is_int(value) and 1 <= value <= MAX_DRAFT_TOKENS
        require(name, value, fits, f"an int from 1 to {MAX_DRAFT_TOKENS}")
        most = self._config.max_n_spec_tokens
        fits = most is None or value <= most
        require(name, value, fits, f"at most max_n_spec_tokens, {most}")

    def check_request(self, params: SamplingParams) -> None:
        """Raise ValueError if a request asks for drafts that it cannot get."""
        num, most = params.num_speculative_tokens, 0
        if self.last_drafter is not None:
            most = self.num_speculative_tokens or self.usual_num_speculative_tokens
        fits = num is None or num <= most
        require("num_speculative_tokens", num, fits, f"at most the drafter's K, {most}")
        if params.prediction is not None and not getattr(self.last_drafter, "copies_texts", False):
            name = "none" if self.last_drafter is None else self.last_drafter.name
            raise ValueError(
                f"prediction: drafter {name!r} does not copy; suffix does, for example"
            )

    def limit(self, request: EngineRequest) -> int:
        """Return K for a request of this drafter."""
        wanted, most = request.params.num_speculative_tokens, self.num_speculative_tokens
        return most if wanted is None else min(wanted, most)

    @property
    def reads_target(self) -> bool:
        """See `Drafter`."""
        return getattr(self.drafter, "reads_target", False)

    def must_start_plainly(self, request: EngineRequest) -> bool:
        """Whether the first token after a prompt is chosen without drafts.

        So it is if the same pass reads the prompt, which the drafter would need. Where drafts
        select random numbers, texts then always start so, or a seed's text would depend on what is
        in the cache; but a prompt of one token is never read before.
        """
        if not self.reads_target or request.num_prompt_tokens == 1:
            return False
        is_greedy = request.params.temperature == 0 and not self.spec.synthetic_acceptance_rate
        is_free = self.is_coupled or is_greedy
        return not is_free or request.num_cached < request.num_prompt_tokens - 1

    def enable(
        self,
        drafter: Drafter,
        num_speculative_tokens: int,
        running: list[EngineRequest],
        spec: SpecConfig,
    ) -> None:
        """Turn on a drafter; ValueError, without any change, if it does not support this K."""
        schedule = self._pacer and self._pacer.schedule(drafter, num_speculative_tokens)
        is_tree = isinstance(drafter, TreeProposer)
        if is_tree and self._chain_rule:
            raise ValueError(f"{self._chain_rule} verifies chains, not token trees")
        max_nodes = drafter.max_nodes(num_speculative_tokens) if is_tree else 0
        self.disable(running)
        self.last_drafter = self.drafter = drafter
        self.spec = spec
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = max_nodes
        self.schedule = schedule

    def disable(self, running: list[EngineRequest]) -> None:
        """Decode plainly; the drafter stays known."""
        for request in running:
            self.release(request)
        self.drafter = self._no_drafter
        self.num_speculative_tokens = self.max_nodes = 0
        self.schedule = None

    def clear(self, running: list[EngineRequest]) -> None:
        """Decode plainly, and discard the drafter."""
        self.disable(running)
        self.last_drafter = None
        if self._pacer is not None:
            self._pacer.forget()

    def propose(
        self, requests: list[EngineRequest], others: list[EngineRequest], batch_size: int
    ) -> tuple[Batch, Proposal]:
        """Return the batch and proposal of the next pass; the `others` in it get no drafts.

        batch_size: how many requests all passes of the step have.
        """
        self._has_failed = False
        most = self.num_speculative_tokens
        own_limits = [self.limit(request) for request in requests] + [0] * len(others)
        requests = requests + others
        none = [0] * len(requests)
        plain = Batch(
            requests,
            num_draft_tokens=none,
            max_nodes=none,
            num_speculative_tokens=most,
            device=self._device,
            backend=self._config.backend,
            own_limits=own_limits if min(own_limits) < most else None,
            is_coupled=self.is_coupled,
        )
        try:
            limits = zip(requests, own_limits, strict=True)
            wanted = [min(request.room, limit) for request, limit in limits]
            most_drafting = self.spec.disable_by_batch_size
            if most_drafting is not None and batch_size > most_drafting:
                wanted = self._only_drawn(requests, wanted)
            batch = replace(plain, num_draft_tokens=wanted, max_nodes=wanted)
            if self.schedule is not None:
                planned = self._planned(self.schedule, requests, wanted)
                batch = self._scheduled(batch, planned)
            elif self.max_nodes:
                batch = self._within_blocks(batch)
            if any(batch.num_draft_tokens):
                proposal = self.drafter.propose(batch)
                check_proposal(proposal, batch, self._vocab_size)
                if proposal.parents is not None and self._chain_rule is not None:
                    raise ValueError(f"{self._chain_rule} verifies chains, not token trees")
                if proposal.on_target_logits is not None:
                    guarded = self._guarded(proposal.on_target_logits, requests)
                    proposal = replace(proposal, on_target_logits=guarded)
                return batch, proposal
        except BaseException as error:
            self._fail(error, requests)
        return plain, self._no_drafter.propose(plain)

    def refuse(self, error: ValueError, batch: Batch) -> tuple[Batch, Proposal]:
        """Record that a proposal cannot be verified; return the step without it."""
        self._fail(error, batch.requests)
        return self.without_drafts(batch)

    def without_drafts(self, batch: Batch) -> tuple[Batch, Proposal]:
        """Return a batch without drafts, and its empty proposal."""
        none = [0] * len(batch.requests)
        batch = replace(batch, num_draft_tokens=none, max_nodes=none, num_model_tokens=None)
        return batch, self._no_drafter.propose(batch)

    def without_non_finite_drafts(
        self, batch: Batch, proposal: Proposal, places: list[int]
    ) -> tuple[list[int], Proposal]:
        """Return those of some requests whose draft logits are not finite, and their usable drafts.

        Records a drafter error if there are any.
        """
        if not reads_draft_logits(self.spec):
            return [], proposal
        places = [place for place in places if batch.requests[place].params.temperature > 0]
        part = proposal.at(places)
        token_ids = self._usable_drafts(part)
        is_cut = (token_ids != part.token_ids).any(dim=1).tolist()
        if any(is_cut):
            what = "contain NaN or inf, or no finite value"
            error = ValueError(f"draft_logits: those of drafter {self.drafter.name} {what}")
            self._fail(error, batch.requests)
        cut = [b for b in range(len(places)) if is_cut[b]]
        return [places[b] for b in cut], replace(part, token_ids=token_ids).at(cut)

    def take_error(self) -> Exception | None:
        """Return the first unreported error and mark it as reported."""
        error, self.error = self.error, None
        return error

    def record(self, request: EngineRequest, step: Step) -> None:
        """Tell the schedule the outcome of a request's draft, also if that of another has failed:
        what it wants next selects random numbers."""
        if self.schedule is not None:
            try:
                self.schedule.record(request, step)
            except BaseException as error:
                self._fail(error, [request])

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Tell the drafter what was accepted of its last proposal, or to forget the requests.

        It forgets them if anything failed in this step, even after the proposal.
        """
        if self._has_failed:
            for request in batch.requests:
                self.release(request)
        else:
            try:
                self.drafter.commit(batch, accepted)
            except BaseException as error:
                self._fail(error, batch.requests)

    def release(self, request: Request) -> None:
        """Let the drafter forget a request that has ended or lost its blocks."""
        try:
            self.drafter.release(request)
        except BaseException as error:
            self._fail(error, ())

    def _usable_drafts(self, proposal: Proposal) -> Tensor:
        return usable_drafts(proposal)

    def _only_drawn(self, requests: list[EngineRequest], wanted: list[int]) -> list[int]:
        """Return the draft tokens of requests whose text depends on the drafts; 0 for the others.

        Only the others may stop drafting because of the size of the batch: the same seed must give
        the same text in any batch.
        """
        free = [self.is_coupled or r.params.temperature == 0 for r in requests]
        return [0 if is_free else num for num, is_free in zip(wanted, free, strict=True)]

    def _scheduled(self, batch: Batch, planned: list[int]) -> Batch:
        """Return a batch with the draft tokens of a schedule."""
        if isinstance(self.drafter, PartlyScheduled):
            return replace(batch, num_model_tokens=planned)
        return replace(batch, num_draft_tokens=planned, max_nodes=planned)

    def _within_blocks(self, batch: Batch) -> Batch:
        """Return a batch of trees that fit into the blocks of their requests."""
        size = self._config.block_size
        free = [len(r.block_table) * size - len(r.token_ids) for r in batch.requests]
        room = [min(self.max_nodes, slots) for slots in free]
        num_draft_tokens = [min(pair) for pair in zip(batch.num_draft_tokens, room, strict=True)]
        pairs = zip(num_draft_tokens, room, strict=True)
        max_nodes = [nodes if num else 0 for num, nodes in pairs]
        return replace(batch, num_draft_tokens=num_draft_tokens, max_nodes=max_nodes)

    def _planned(
        self, schedule: Schedule, requests: list[EngineRequest], num_draft_tokens: list[int]
    ) -> list[int]:
        """Return the draft tokens that a schedule wants, up to the given numbers."""
        common = None
        if isinstance(schedule, AdaptiveSchedule):
            pairs = zip(requests, num_draft_tokens, strict=True)
            common = schedule.common_length([request for request, limit in pairs if limit])
        wanted = []
        for request, limit in zip(requests, num_draft_tokens, strict=True):
            decides = common is None or request.params.temperature > 0
            num = schedule.num_draft_tokens(request) if decides and limit else common
            wanted.append(num if limit else 0)
        for num in wanted:
            require_int("num_draft_tokens", num, 0)
        return [min(pair) for pair in zip(wanted, num_draft_tokens, strict=True)]

    def _fail(self, error: BaseException, requests: Sequence[Request]) -> None:
        """Keep an error of a drafter or schedule, and let the drafter forget the requests.

        An interrupt makes the drafter forget them as well, and is raised again.
        """
        self._has_failed = True
        if isinstance(error, Exception):
            self.error = self.error or error
        for request in requests:
            self.release(request)
        if not isinstance(error, Exception):
            raise error

    def _guarded(self, call: Callable[..., None], requests: list[EngineRequest]) -> Callable:
        def guarded(*args) -> None:
            try:
                call(*args)
            except BaseException as error:
                self._fail(error, requests)

        return guarded


def _chain_rule(spec: SpecConfig) -> str | None:
    """Return the option by which only chains can be verified, as the start of an error message.

    `SpecConfig` refuses it with its own methods for trees; this is for a tree drafter made by the
    user, which is passed to the engine.
    """
    if spec.rejection_sample_method == "block":
        return "rejection_sample_method: 'block'"
    if (factor := spec.relaxed_acceptance) != 1:
        return f"relaxed_acceptance: {factor!r}"
    if (rate := spec.synthetic_acceptance_rate) is not None:
        return f"synthetic_acceptance_rate: {rate!r}"
    return None
