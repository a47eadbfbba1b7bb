"""The drafters of an engine: which are known and on, and how much each proposes for whom."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import EngineConfig, SamplingParams, SpecConfig, is_int
from fastspec.config.checks import require, require_int
from fastspec.config.speculation import MAX_DRAFT_TOKENS
from fastspec.drafters import Drafter, GlideDrafter, Proposal, TreeProposer
from fastspec.drafters.base import Batch, CorpusReader, NoDrafter, Request, check_proposal
from fastspec.drafters.context import DrafterContext, DrafterPlan, DrafterSource
from fastspec.drafters.draft_model import draft_model_of
from fastspec.drafters.registry import plan_drafter, plan_given
from fastspec.drafters.suffix_first import SuffixFirst
from fastspec.engine.acceptance import are_spoilt, reads_draft_logits
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.outputs import RequestOutput, Verdict
from fastspec.engine.pacing import Pacer
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.schedule import AdaptiveSchedule, Schedule, Step
from fastspec.models.encoder_decoder import check_same_kind
from fastspec.models.runner import ModelRunner
from fastspec.models.sharded import Ranks
from fastspec.models.transfer import device_tensor

_HEAD = 6  # columns before the tokens of a packed proposal
_ELSEWHERE = "drafter: failed on another rank, whose own error says why"


class Speculation:
    """Proposals of the drafter that is on, or none.

    A drafter or schedule may be anybody's code. What it raises, and what it proposes against the
    protocol, becomes `error`: for the rest of the step it is off, decoding goes on plainly, and it
    begins anew in the next step with requests that it knows nothing of.

    Args:
        chains_only: a target that cannot judge trees, as errors begin.
        pacer: makes the schedules; None = always K.
    Attributes:
        spec: how the target judges what is proposed.
        usual_num_speculative_tokens: K where none is named.
        known: the drafter that is on, or was on last.
        num_speculative_tokens: tokens of a request that one step can accept at most; 0 while off.
        max_nodes: of a request's tree; 0 where the drafter proposes chains, and while off.
        error: the first that nobody has heard of yet.
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
        for_trees = {
            "rejection_sample_method": ("standard", "coupled"),
            "relaxed_acceptance": (1,),
            "synthetic_acceptance_rate": (None,),
        }
        given = ((name, getattr(spec, name)) for name in for_trees)
        chain_rules = (f"{name}: {v!r}" for name, v in given if v not in for_trees[name])
        self.is_coupled = spec.rejection_sample_method == "coupled"
        self._chains_only = chains_only
        self._pacer = pacer
        self._chain_rule = chains_only or next(chain_rules, None)
        self._config = config
        self.spec = spec
        self.usual_num_speculative_tokens = spec.num_draft_tokens(config.max_n_spec_tokens)
        self._no_drafter = NoDrafter()
        self._has_failed = False  # in this step
        self.drafter: Drafter = self._no_drafter
        self.known: Drafter | None = None
        self.num_speculative_tokens = 0
        self.max_nodes = 0
        self.schedule: Schedule | None = None
        self.error: Exception | None = None

    @property
    def is_on(self) -> bool:
        return self.drafter is not self._no_drafter

    def check_count(self, name: str, value: int) -> None:
        """Refuse a number of draft tokens that is none, or more than the engine allows."""
        fits = is_int(value) and 1 <= value <= MAX_DRAFT_TOKENS
        require(name, value, fits, f"an int from 1 to {MAX_DRAFT_TOKENS}")
        most = self._config.max_n_spec_tokens
        fits = most is None or value <= most
        require(name, value, fits, f"at most max_n_spec_tokens, {most}")

    def check_request(self, params: SamplingParams) -> None:
        """Refuse a request that asks for more draft tokens than it can get."""
        num, most = params.num_speculative_tokens, 0
        if self.known is not None:
            most = self.num_speculative_tokens or self.usual_num_speculative_tokens
        fits = num is None or num <= most
        require("num_speculative_tokens", num, fits, f"at most K of the drafter, {most}")

    def limit(self, request: EngineRequest) -> int:
        """K of a request of this drafter."""
        wanted, most = request.params.num_speculative_tokens, self.num_speculative_tokens
        return most if wanted is None else min(wanted, most)

    def enable(
        self, drafter: Drafter, num_speculative_tokens: int, running: list[EngineRequest]
    ) -> None:
        """Turn on a drafter; ValueError, and no change, when it cannot propose so many tokens."""
        schedule = self._pacer and self._pacer.schedule(drafter, num_speculative_tokens)
        is_tree = isinstance(drafter, TreeProposer)
        if is_tree and self._chains_only:
            raise ValueError(f"{self._chains_only} judges chains, not token trees")
        max_nodes = drafter.max_nodes(num_speculative_tokens) if is_tree else 0
        self.disable(running)
        self.known = self.drafter = drafter
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
        """Decode plainly, and let the drafter go."""
        self.disable(running)
        self.known = None
        if self._pacer is not None:
            self._pacer.forget()

    def propose(
        self, requests: list[EngineRequest], others: list[EngineRequest]
    ) -> tuple[Batch, Proposal]:
        """The next step of its requests and of others, who get no drafts; what is to be judged."""
        self._has_failed = False
        most, device, backend = self.num_speculative_tokens, self._device, self._config.backend
        own_limits = [self.limit(request) for request in requests] + [0] * len(others)
        requests = requests + others
        pairs = list(zip(requests, own_limits, strict=True))
        rules = device, backend, own_limits if min(own_limits) < most else None, self.is_coupled
        try:
            num_draft_tokens = max_nodes = [min(r.room, limit) for r, limit in pairs]
            most_drafting = self.spec.disable_by_batch_size
            if most_drafting is not None and len(requests) > most_drafting:
                free = (self.is_coupled or r.params.temperature == 0 for r in requests)
                pairs = zip(num_draft_tokens, free, strict=True)
                num_draft_tokens = max_nodes = [0 if is_free else num for num, is_free in pairs]
            of_model = None
            if self.schedule is not None and isinstance(self.drafter, SuffixFirst):
                of_model, _ = self._planned(requests, num_draft_tokens)
            elif self.max_nodes or self.schedule is not None:
                num_draft_tokens, max_nodes = self._planned(requests, num_draft_tokens)
            batch = Batch(requests, num_draft_tokens, max_nodes, most, *rules, of_model)
            if any(batch.num_draft_tokens):
                proposal = self.drafter.propose(batch)
                check_proposal(proposal, batch, self._vocab_size)
                if proposal.parents is not None and self._chain_rule is not None:
                    raise ValueError(f"{self._chain_rule} judges chains, not token trees")
                if proposal.on_judged is not None:
                    told = self._guarded(proposal.on_judged, requests)
                    proposal = replace(proposal, on_judged=told)
                return batch, proposal
        except BaseException as error:
            self._fail(error, requests)
        none = [0] * len(requests)
        batch = Batch(requests, none, none, most, *rules)
        return batch, self._no_drafter.propose(batch)

    def without_drafts(
        self, batch: Batch, places: Sequence[int] | None = None
    ) -> tuple[Batch, Proposal]:
        """The requests of a batch, or those at some places, with nothing to judge."""
        places = range(len(batch.requests)) if places is None else places
        none, limits = [0] * len(places), batch.own_limits
        batch = replace(
            batch,
            requests=[batch.requests[place] for place in places],
            num_draft_tokens=none,
            max_nodes=none,
            own_limits=limits and [limits[place] for place in places],
            num_model_tokens=None,
        )
        return batch, self._no_drafter.propose(batch)

    def take_blame(self, batch: Batch, proposal: Proposal, verdicts: Sequence[Verdict]) -> None:
        """Note an error of the drafter's if a request failed by its logits, and not by its own."""
        if reads_draft_logits(self.spec) and self._is_to_blame(batch, proposal, verdicts):
            what = "hold NaN or inf, or nothing finite"
            error = ValueError(f"draft_logits: those of drafter {self.drafter.name} {what}")
            self._fail(error, batch.requests)

    def _is_to_blame(self, batch: Batch, proposal: Proposal, verdicts: Sequence[Verdict]) -> bool:
        return any(
            verdict.accepted_len < 0
            and request.params.temperature > 0
            and are_spoilt(proposal, place, verdict)
            for place, (request, verdict) in enumerate(zip(batch.requests, verdicts, strict=True))
        )

    def take_error(self) -> Exception | None:
        """The first error that nobody has heard of yet, which then counts as heard."""
        error, self.error = self.error, None
        return error

    def record(self, request: EngineRequest, step: Step) -> None:
        """Tell the schedule what became of a request's draft."""
        if self.schedule is not None and not self._has_failed:
            try:
                self.schedule.record(request, step)
            except BaseException as error:
                self._fail(error, [request])

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        """Tell the drafter what was kept of its last proposal, or to forget the requests.

        It forgets them where anything failed in this step, be it after the proposal.
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

    def _planned(
        self, requests: list[EngineRequest], num_draft_tokens: list[int]
    ) -> tuple[list[int], list[int]]:
        """Draft tokens of each request, at most so many, and nodes; a tree may fill its blocks."""
        if self.max_nodes:
            size = self._config.block_size
            free = [len(r.block_table) * size - len(r.token_ids) for r in requests]
            room = [min(self.max_nodes, slots) for slots in free]
            pairs = [(min(pair), pair[1]) for pair in zip(num_draft_tokens, room, strict=True)]
            return [num for num, _ in pairs], [nodes if num else 0 for num, nodes in pairs]
        schedule, common = self.schedule, None
        assert schedule is not None
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
        num_draft_tokens = [min(pair) for pair in zip(wanted, num_draft_tokens, strict=True)]
        return num_draft_tokens, num_draft_tokens

    def _fail(self, error: BaseException, requests: Sequence[Request]) -> None:
        """Keep what a drafter or schedule raised, and let the drafter forget the requests.

        An interrupt goes on; it too leaves a drafter that knows nothing of them.
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


class SharedSpeculation(Speculation):
    """Proposals of a target's ranks: all of them judge that of rank 0.

    What one of them cannot propose costs all of them the drafts of that step. A drafter whose
    proposal was another one than rank 0's forgets the requests: it has not written what is judged.
    Schedules hear on all ranks of what became of rank 0's, so that they stay alike.

    Early exit drafts with layers of the target, in passes that end only when all ranks run them. So
    rank 0's schedule says how many, each of their tokens is rank 0's, and what fails between them
    ends the engines of all ranks.
    """

    def __init__(self, ranks: Ranks, *args):
        super().__init__(*args)
        self._ranks = ranks
        self._is_replaced = False  # what was proposed here, in this step

    @property
    def _drafts_together(self) -> bool:
        draft = draft_model_of(self.drafter)
        return draft is not None and draft.runner.paged_model.ranks is not None

    def propose(
        self, requests: list[EngineRequest], others: list[EngineRequest]
    ) -> tuple[Batch, Proposal]:
        self._is_replaced = False
        batch, proposal = super().propose(requests, others)
        most = self.num_speculative_tokens
        width = max(most, self.max_nodes)
        if not width:
            return batch, proposal
        if (wide := proposal.token_ids.shape[1]) > width:
            error = ValueError(f"propose: expected trees of at most {width} nodes, got {wide}")
            self._fail(error, batch.requests)
            batch, proposal = self.without_drafts(batch)
        own = self._packed(batch, proposal, width)
        shared = own.clone()
        if self._ranks.rank:
            shared[:, 1:] = torch.iinfo(shared.dtype).max
        shared = self._ranks.least_of(shared)
        rows = shared.tolist()
        has_failed, tree_width, *_ = rows[0]
        if has_failed:
            if not self._has_failed:
                super()._fail(RuntimeError(_ELSEWHERE), batch.requests)
            return self.without_drafts(batch)
        if rows == own.tolist():
            return batch, proposal
        if not self._drafts_together:
            self._is_replaced = True
            for request in batch.requests:
                self.release(request)
        columns = ([row[place] for row in rows] for place in range(_HEAD))
        _, _, limits, nodes, counts, asked = columns
        is_tree = tree_width >= 0
        token_ids, parents = shared[:, _HEAD:].split(width, dim=1)
        count = tree_width if is_tree else most
        proposal = Proposal(
            token_ids[:, :count].contiguous(),
            parents[:, :count].contiguous() if is_tree else None,
            num_tokens=None if counts[0] < 0 else counts,
            sibling_rule="target_only" if is_tree else None,
            num_asked=[None if num < 0 else num for num in asked],
        )
        return replace(batch, num_draft_tokens=limits, max_nodes=nodes), proposal

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        if not self._is_replaced:
            super().commit(batch, accepted)

    def _is_to_blame(self, batch: Batch, proposal: Proposal, verdicts: Sequence[Verdict]) -> bool:
        """Whether rank 0's is, whose logits were judged."""
        own = torch.tensor([super()._is_to_blame(batch, proposal, verdicts)], dtype=torch.int32)
        return bool(self._ranks.of_first(own.to(self._device)))

    def _planned(
        self, requests: list[EngineRequest], num_draft_tokens: list[int]
    ) -> tuple[list[int], list[int]]:
        if self.schedule is None or not self._drafts_together:
            return super()._planned(requests, num_draft_tokens)
        own, most = None, torch.iinfo(torch.int64).max
        try:  # of chains: trees have no schedule
            own, _ = super()._planned(requests, num_draft_tokens)
        except Exception as error:
            super()._fail(error, requests)
        values = [most] * len(requests) if self._ranks.rank or own is None else own
        has_failed, *shared = self._ranks.least([-int(own is None), *values])
        if has_failed:
            if own is not None:
                super()._fail(RuntimeError(_ELSEWHERE), requests)
            shared = [0] * len(requests)
        return shared, shared

    def _fail(self, error: BaseException, requests: Sequence[Request]) -> None:
        super()._fail(error, requests)
        if self._drafts_together:  # others may be in its passes, or wait for them
            raise error

    def _packed(self, batch: Batch, proposal: Proposal, width: int) -> Tensor:
        """[B, _HEAD + 2 * width] int32: what the target reads depends on.

        That is -1 where this rank has failed, the width of trees or -1, the tokens and the nodes
        that were wanted, the number proposed or -1, and for schedules the number that a draft model
        was asked for or -1; tokens; parents.
        """
        num, ids = len(batch.requests), proposal.token_ids
        parents = ids if proposal.parents is None else proposal.parents
        asked = proposal.num_asked or batch.num_draft_tokens
        heads = [
            [-int(self._has_failed)] * num,
            [-1 if proposal.parents is None else ids.shape[1]] * num,
            batch.num_draft_tokens,
            batch.max_nodes,
            [-1] * num if proposal.num_tokens is None else proposal.num_tokens,
            [-1 if wanted is None else wanted for wanted in asked],
        ]
        columns = device_tensor(heads, torch.int32, ids.device).t()
        missing = 0, width - ids.shape[1]
        parts = [pad(part, missing, value=-1) for part in (ids, parents)]
        return torch.cat([columns, *parts], dim=1)


class Speculations(dict[str | None, Speculation]):
    """All drafters of an engine, by `SamplingParams.drafter`; None names its own.

    Args:
        drafting: the target and the options that drafters are made for.
        runner, block_manager: of the target.
        factory: makes the requests that steps are measured with.
    """

    def __init__(
        self,
        drafting: DrafterContext,
        runner: ModelRunner,
        block_manager: BlockManager,
        factory: RequestFactory,
    ):
        super().__init__()
        self._drafting, self._runner = drafting, runner
        self._block_manager, self._factory = block_manager, factory

    def plan(self, spec: SpecConfig, drafter: DrafterSource | None) -> DrafterPlan | None:
        """What would draft, see `plan_drafter`."""
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_drafter", spec=spec)
        return plan_drafter(replace(self._drafting, spec=spec, drafter=drafter))

    def add(self, name: str | None, spec: SpecConfig, plan: DrafterPlan | None) -> Speculation:
        """Make a drafter known by a name that is free, and turn it on; a plan of None is plain.

        Raises:
            ValueError: K is too large, or the drafter does not fit the target or the options.
        """
        target, config = self._runner.paged_model, self._drafting.config
        pacer = Pacer(spec, self._runner, self._block_manager, self._factory, config)
        sizes = self._runner.device, target.vocab_size
        given = *sizes, spec, config, target.chains_only, pacer
        ranks = target.ranks
        speculation = Speculation(*given) if ranks is None else SharedSpeculation(ranks, *given)
        count, option = speculation.usual_num_speculative_tokens, "num_speculative_tokens"
        if count > spec.num_model_tokens(config.max_n_spec_tokens):
            option = "tree_suffix" if spec.tree_suffix else "suffix_tokens"
        speculation.check_count(option, count)
        if plan is not None:
            speculation.enable(self._built(plan), speculation.usual_num_speculative_tokens, [])
        self[name] = speculation
        return speculation

    def enable(
        self,
        drafter: DrafterSource | None,
        num_speculative_tokens: int | None,
        wants_glide: bool,
        running: list[EngineRequest],
    ) -> None:
        """Turn on the engine's own drafter, or another in its place; see `enable_spec_dec`."""
        own = self[None]
        if (ranks := self._runner.paged_model.ranks) is not None:
            given = {"num_tokens": num_speculative_tokens, "is_new": drafter is not None}
            ranks.check(call="enable_spec_dec", **given)
        if num_speculative_tokens is None:
            num_speculative_tokens = own.usual_num_speculative_tokens
        own.check_count("n_spec_tokens", num_speculative_tokens)
        known = own.known
        if drafter is not None:
            given = {"drafter": drafter, "wants_glide": wants_glide}
            known = self._built(plan_given(replace(self._drafting, **given)))
        elif known is None:
            raise ValueError("drafter: there is none to enable; pass one")
        elif wants_glide and not isinstance(draft_model_of(known), GlideDrafter):
            raise ValueError("use_glide_drafter: the drafter to enable is not a GLIDE model")
        own.enable(known, num_speculative_tokens, running)

    def add_corpus(self, texts: list[list[int]]) -> None:
        """Give the drafters that read one a corpus; ValueError where none does."""
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_corpus", texts=texts)
        known = [each.known for each in self.values()]
        readers = [each for each in known if isinstance(each, CorpusReader)]
        if not readers:
            raise ValueError("texts: no drafter of this engine reads a corpus; suffix does")
        for reader in readers:
            reader.add_corpus(texts)

    def raise_error(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise what a drafter or schedule raised, if it did, with complete outputs attached."""
        for speculation in self.values():
            if (error := speculation.take_error()) is not None:
                error.__dict__["outputs"] = list(outputs)
                raise error

    def _built(self, plan: DrafterPlan) -> Drafter:
        check_same_kind(self._runner.paged_model, plan.models)
        return plan.build(self._runner, self._block_manager)
