"""Keeps engines in several processes that share a target's weights in lockstep."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from fastspec.config import EngineConfig, SpecConfig
from fastspec.drafters import Proposal
from fastspec.drafters.base import Batch, Request
from fastspec.drafters.draft_model import draft_model_of
from fastspec.engine.loop import Loop
from fastspec.engine.request import EngineRequest
from fastspec.engine.schedule import Schedule
from fastspec.engine.speculation import Speculation
from fastspec.models.sharded import ADDRESS, Ranks, ranks_of
from fastspec.models.transfer import device_tensor

_ELSEWHERE = "drafter: failed on another rank; see the error there"


def check_options(model: PreTrainedModel, spec: SpecConfig, config: EngineConfig) -> None:
    """Raise on all ranks of a target unless they make engines with the same options."""
    ranks = ranks_of(model)
    if ranks is not None:
        options = {"spec": spec, "config": replace(config, device="auto")}
        ranks.check(call="Engine", target=type(model).__name__, **options)


def new_seeds(ranks: Ranks | None) -> Callable[[], int]:
    """Return a generator of seeds for requests without one."""
    return partial(secrets.randbits, 63) if ranks is None else ranks.new_seeds()


class SameRounds(Loop):
    """Rounds that the ranks of a target begin only if all are in the same state."""

    def __init__(self, ranks: Ranks, **fields: Any):
        super().__init__(**fields)
        self._ranks = ranks
        self._numbers: WeakKeyDictionary[EngineRequest, int] = WeakKeyDictionary()

    def round(self) -> None:
        self.drop_abandoned()  # before the ranks compare what is left
        self._check_state()
        try:
            super().round()
        except BaseException as error:
            failure = self._ranks.failed(error)
            if isinstance(error, RuntimeError):  # such as a lost connection, wherever it surfaces
                raise failure from error
            raise

    def _check_state(self) -> None:
        """Raise on all ranks unless they have the same requests, read equally far."""
        drafters = {
            name: (each.drafter.name, each.num_speculative_tokens, each.max_nodes)
            for name, each in self.speculations.items()
        }
        running = [
            (r.request_id, len(r.token_ids), r.num_cached, len(r.block_table), self._number(r))
            for r in self.scheduler.running
        ]
        waiting = [(r.request_id, self._number(r)) for r in self.scheduler.waiting]
        state = {"drafters": drafters, "running": running, "waiting": waiting}
        blocks = self.scheduler.block_manager
        self._ranks.check(call="step", **state, free_blocks=blocks.num_free)

    def _number(self, request: EngineRequest) -> int:
        """Checksum of the request as submitted, cached; the tokens after it come from rank 0."""
        number = self._numbers.get(request)
        if number is None:
            start = request.token_ids[: request.num_prompt_tokens]
            asked = request.prompt_ids, start, request.seed, request.max_len, request.params
            text = ADDRESS.sub("", repr((*asked, sorted(request.stop_ids))))
            number = self._numbers[request] = crc32(text.encode())
        return number


class _PackedHeads(NamedTuple):
    """The columns before the tokens of a packed proposal, with a number per request.

    The first three are the same for all requests: repeated, they fit into the same tensor.
    """

    has_failed: list[int]  # -1 if any rank has failed, so that the minimum over the ranks tells
    is_tree: list[int]
    num_columns: list[int]  # of the proposal
    num_draft_tokens: list[int]
    max_nodes: list[int]
    num_tokens: list[int]  # of the proposal; -1 for None
    num_asked: list[int]  # of the proposal, or else num_draft_tokens; -1 for None


_NUM_HEADS = len(_PackedHeads._fields)


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
        self, requests: list[EngineRequest], others: list[EngineRequest], batch_size: int
    ) -> tuple[Batch, Proposal]:
        self._is_replaced = False
        batch, proposal = super().propose(requests, others, batch_size)
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
        shared = self._ranks.all_reduce_min_(shared)
        rows = shared.tolist()
        heads = _PackedHeads(*map(list, zip(*(row[:_NUM_HEADS] for row in rows), strict=True)))
        if heads.has_failed[0]:
            if not self._has_failed:
                super()._fail(RuntimeError(_ELSEWHERE), batch.requests)
            return self.without_drafts(batch)
        if rows == own.tolist():
            return batch, proposal
        if not self._drafts_together:
            self._is_replaced = True
            for request in batch.requests:
                self.release(request)
        token_ids, parents = shared[:, _NUM_HEADS:].split(width, dim=1)
        count, is_tree = heads.num_columns[0], heads.is_tree[0]
        proposal = Proposal(
            token_ids[:, :count].contiguous(),
            parents[:, :count].contiguous() if is_tree else None,
            num_tokens=None if heads.num_tokens[0] < 0 else heads.num_tokens,
            sibling_rule="target_only" if is_tree else None,
            num_asked=[None if num < 0 else num for num in heads.num_asked],
        )
        batch = replace(batch, num_draft_tokens=heads.num_draft_tokens, max_nodes=heads.max_nodes)
        return batch, proposal

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        if not self._is_replaced:
            super().commit(batch, accepted)

    def _usable_drafts(self, proposal: Proposal) -> Tensor:
        """Those of rank 0, because its logits were used."""
        return self._ranks.broadcast(super()._usable_drafts(proposal))

    def _planned(
        self, schedule: Schedule, requests: list[EngineRequest], num_draft_tokens: list[int]
    ) -> list[int]:
        if not self._drafts_together:
            return super()._planned(schedule, requests, num_draft_tokens)
        own, most = None, torch.iinfo(torch.int64).max
        try:
            own = super()._planned(schedule, requests, num_draft_tokens)
        except Exception as error:  # of a schedule, which may be third-party code
            super()._fail(error, requests)
        values = [most] * len(requests) if self._ranks.rank or own is None else own
        has_failed, *shared = self._ranks.all_reduce_min([-int(own is None), *values])
        if has_failed:
            if own is not None:
                super()._fail(RuntimeError(_ELSEWHERE), requests)
            shared = [0] * len(requests)
        return shared

    def _fail(self, error: BaseException, requests: Sequence[Request]) -> None:
        super()._fail(error, requests)
        if self._drafts_together:  # other ranks may be in its passes, or wait for them
            raise error

    def _packed(self, batch: Batch, proposal: Proposal, width: int) -> Tensor:
        """Pack everything that the target's pass depends on: [B, _NUM_HEADS + 2 * width] int32.

        Columns: the fields of `_PackedHeads`, then tokens, then parents.
        """
        num, ids = len(batch.requests), proposal.token_ids
        parents = ids if proposal.parents is None else proposal.parents
        asked = proposal.num_asked or batch.num_draft_tokens
        heads = _PackedHeads(
            has_failed=[-int(self._has_failed)] * num,
            is_tree=[int(proposal.parents is not None)] * num,
            num_columns=[ids.shape[1]] * num,
            num_draft_tokens=batch.num_draft_tokens,
            max_nodes=batch.max_nodes,
            num_tokens=[-1] * num if proposal.num_tokens is None else proposal.num_tokens,
            num_asked=[-1 if wanted is None else wanted for wanted in asked],
        )
        columns = device_tensor([*heads], torch.int32, ids.device).t()
        missing = 0, width - ids.shape[1]
        parts = [pad(part, missing, value=-1) for part in (ids, parents)]
        return torch.cat([columns, *parts], dim=1)
