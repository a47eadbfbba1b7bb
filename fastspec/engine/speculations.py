"""The drafters of an engine by name, and proposals that the ranks of a target share."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.config import SpecConfig
from fastspec.config.checks import require
from fastspec.config.methods import method_named
from fastspec.drafters import Drafter, GlideDrafter, Proposal
from fastspec.drafters.base import Batch, CorpusReader, Request
from fastspec.drafters.context import DrafterContext, DrafterPlan, DrafterSource
from fastspec.drafters.draft_model import draft_model_of
from fastspec.drafters.registry import plan_drafter, plan_given
from fastspec.engine.block_manager import BlockManager
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.pacing import Pacer
from fastspec.engine.request import EngineRequest
from fastspec.engine.request_factory import RequestFactory
from fastspec.engine.speculation import Speculation
from fastspec.models.model_kinds import check_same_kind
from fastspec.models.runner import ModelRunner
from fastspec.models.sharded import Ranks
from fastspec.models.transfer import device_tensor

logger = logging.getLogger(__name__)

_HEAD = 6  # columns before the tokens of a packed proposal
_ELSEWHERE = "drafter: failed on another rank; see the error there"


class SharedSpeculation(Speculation):
    """Proposals on the ranks of a shared target, all of which verify that of rank 0.

    If one rank fails to propose, all ranks lose the drafts of that step. A drafter whose proposal
    differs from rank 0's forgets the requests, because it did not write the verified tokens.
    Schedules on all ranks record the outcome of rank 0's proposal, so that they stay identical.

    Early exit drafts with layers of the target, in passes that end only when all ranks run them. So
    rank 0's schedule decides how many tokens, each token is rank 0's, and an error between passes
    ends the engines of all ranks.
    """

    def __init__(self, ranks: Ranks, *args):
        super().__init__(*args)
        self._ranks = ranks
        self._is_replaced = False  # whether this rank's proposal of this step was

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
            batch, proposal = self.refuse(error, batch)
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
        heads = zip(*(row[:_HEAD] for row in rows), strict=True)
        _, _, limits, nodes, counts, asked = map(list, heads)
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

    def _usable_drafts(self, proposal: Proposal) -> Tensor:
        """Those of rank 0, because its logits were used."""
        return self._ranks.of_first(super()._usable_drafts(proposal))

    def _planned(
        self, requests: list[EngineRequest], num_draft_tokens: list[int]
    ) -> tuple[list[int], list[int]]:
        if self.schedule is None or not self._drafts_together:
            return super()._planned(requests, num_draft_tokens)
        own, most = None, torch.iinfo(torch.int64).max
        try:  # chains only: trees have no schedule
            own, _ = super()._planned(requests, num_draft_tokens)
        except Exception as error:  # of a schedule, which may be third-party code
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
        if self._drafts_together:  # other ranks may be in its passes, or wait for them
            raise error

    def _packed(self, batch: Batch, proposal: Proposal, width: int) -> Tensor:
        """Pack everything that the target's pass depends on: [B, _HEAD + 2 * width] int32.

        Columns: -1 if this rank has failed, the width of trees or -1, the wanted tokens, the wanted
        nodes, the number proposed or -1, and for schedules the number requested of a draft model or
        -1; then tokens; then parents.
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
    """All drafters of an engine, by `SamplingParams.drafter`; None is the engine's own.

    Args:
        drafting: the target and the options that drafters are made for.
        runner, block_manager: those of the target.
        factory: makes the requests with which steps are measured.
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
        """Plan a drafter without building it, see `plan_drafter`."""
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_drafter", spec=spec)
        return plan_drafter(replace(self._drafting, spec=spec, drafter=drafter))

    def add(self, name: str | None, spec: SpecConfig, plan: DrafterPlan | None) -> Speculation:
        """Add a drafter under an unused name and turn it on; a plan of None = plain decoding.

        Raises:
            ValueError: K is too large, or the drafter does not fit the target or the options.
        """
        target, config = self._runner.paged_model, self._drafting.config
        spec = _as_planned(spec, plan)
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
        """Turn on the engine's own drafter, or replace it by another; see `enable_spec_dec`."""
        own = self[None]
        if (ranks := self._runner.paged_model.ranks) is not None:
            given = {"num_tokens": num_speculative_tokens, "is_new": drafter is not None}
            ranks.check(call="enable_spec_dec", **given)
        if num_speculative_tokens is None:
            num_speculative_tokens = own.usual_num_speculative_tokens
        own.check_count("n_spec_tokens", num_speculative_tokens)
        if own.spec.suffix_tokens or own.spec.tree_suffix:
            most = own.usual_num_speculative_tokens  # the part of the draft model is fixed
            fits, expected = num_speculative_tokens <= most, f"at most {most} with copies"
            require("n_spec_tokens", num_speculative_tokens, fits, expected)
        known, spec = own.known, own.spec
        if drafter is not None:
            given = {"drafter": drafter, "wants_glide": wants_glide}
            plan = plan_given(replace(self._drafting, **given))
            known, spec = self._built(plan), _as_planned(self._drafting.spec, plan)
        elif known is None:
            raise ValueError("drafter: none to enable; pass one")
        elif wants_glide and not isinstance(draft_model_of(known), GlideDrafter):
            raise ValueError("use_glide_drafter: the drafter to enable is not a GLIDE model")
        own.enable(known, num_speculative_tokens, running)
        own.spec = spec
        if drafter is not None and method_named(spec.method).sets_length:
            logger.warning("drafter: it drafts alone, without the cascade that spec describes")

    def add_corpus(self, texts: list[list[int]]) -> None:
        """Pass a corpus to the drafters that read one; ValueError if there is none."""
        if (ranks := self._runner.paged_model.ranks) is not None:
            ranks.check(call="add_corpus", texts=texts)
        known = [each.known for each in self.values()]
        readers = [each for each in known if isinstance(each, CorpusReader)]
        if not readers:
            raise ValueError("texts: no drafter of this engine reads a corpus; suffix does")
        for reader in readers:
            reader.add_corpus(texts)

    def raise_unreported_error(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise an unreported error of a drafter or schedule, with complete outputs attached."""
        for speculation in self.values():
            if (error := speculation.take_error()) is not None:
                error.__dict__["outputs"] = list(outputs)
                raise error

    def _built(self, plan: DrafterPlan) -> Drafter:
        check_same_kind(self._runner.paged_model, plan.models)
        return plan.build(self._runner, self._block_manager)


def _as_planned(spec: SpecConfig, plan: DrafterPlan | None) -> SpecConfig:
    """Return options with what was chosen for a draft model that has another tokenizer."""
    chosen = plan and plan.heterogeneous_vocab
    reads_it = "heterogeneous_vocab" in method_named(spec.method).fields
    return replace(spec, heterogeneous_vocab=chosen) if chosen and reads_it else spec
