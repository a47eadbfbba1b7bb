"""A smaller model as drafter: K decoding steps over its own paged cache, without host syncs."""

import sys
from collections.abc import Container
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from fastspec.block_manager import BlockManager
from fastspec.drafters.base import Proposal
from fastspec.request import DRAFT_STREAM, Batch, Request, SamplingTensors
from fastspec.runner import ModelRunner, Span
from fastspec_kernels import sample, uniform

_PREFILL_FROM = 8  # more missing tokens than this are read in a pass of their own, without logits


class DraftModelDrafter:
    """Drafts with a language model that has the target's tokenizer.

    Its cache uses the target's block tables, so a request's pages have the same ids in both caches
    and rolling back costs nothing. Which pages it has filled it knows by itself: a page that the
    target shares between requests may hold nothing of the draft model yet.
    """

    name = "draft_model"

    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        target_vocab_size: int,
        probabilistic: bool,
    ):
        self._runner = runner
        self._block_manager = block_manager
        self._vocab_size = min(runner.vocab_size, target_vocab_size)
        self._probabilistic = probabilistic
        self._num_cached: dict[str, int] = {}
        self._filled: dict[int, int] = {}  # by block id, its tenancy when it was full

    def propose(self, batch: Batch) -> Proposal:
        limits = [
            min(wanted, self._room(request))
            for request, wanted in zip(batch.requests, batch.num_draft_tokens, strict=True)
        ]
        shape = (len(limits), batch.num_speculative_tokens)
        token_ids = torch.full(shape, -1, dtype=torch.int32, device=batch.device)
        keeps_logits = self._probabilistic and not batch.all_greedy
        sampling = batch.sampling if self._probabilistic else self._greedy(batch)
        uniforms = uniform(batch.seeds, batch.positions, shape[1], DRAFT_STREAM)
        draft_logits = None
        drafting = [index for index, limit in enumerate(limits) if limit]
        step_ids, spans = self._read_committed(batch, drafting)
        for step in range(max(limits, default=0)):
            rows = [end - 1 for end in accumulate(span.count for span in spans)]
            logits = self._runner.forward(step_ids, spans, rows)[:, : self._vocab_size]
            chosen = slice(None) if len(drafting) == len(limits) else self._index(drafting)
            picked, _ = sample(
                logits, uniforms[chosen, step].contiguous(), **_take(sampling, chosen)
            )
            token_ids[chosen, step] = picked
            if keeps_logits:
                if draft_logits is None:
                    draft_logits = logits.new_zeros((*shape, self._vocab_size))
                draft_logits[chosen, step] = logits
            keep = [place for place, index in enumerate(drafting) if limits[index] > step + 1]
            if len(keep) < len(drafting):
                picked = picked[self._index(keep)]
            drafting = [drafting[place] for place in keep]
            spans = [
                spans[place].part(spans[place].start + spans[place].count, 1) for place in keep
            ]
            step_ids = picked.clamp(min=0).to(torch.int64)
        for request, limit in zip(batch.requests, limits, strict=True):
            if limit:
                self._num_cached[request.request_id] = len(request.token_ids) + limit - 1
        return Proposal(token_ids, draft_logits=draft_logits)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        for request in batch.requests:
            if request.request_id in self._num_cached:
                cached = self._num_read(request)
                self._num_cached[request.request_id] = cached
                self._mark_filled(request.block_table, cached)

    def release(self, request: Request) -> None:
        self._num_cached.pop(request.request_id, None)

    def _read_committed(self, batch: Batch, drafting: list[int]) -> tuple[Tensor, list[Span]]:
        """Spans of committed tokens not cached yet; long ones are read up to the last token.

        These are packed in order, so a request can build on what one before it is about to read.
        """
        unread: list[int] = []
        spans, late_ids, late_spans = [], [], []
        filling: set[int] = set()
        for index in drafting:
            request = batch.requests[index]
            start, end = self._num_read(request, filling), len(request.token_ids)
            if end - start > _PREFILL_FROM:
                filling.update(request.block_table[: (end - 1) // self._block_manager.block_size])
                late_ids.append(self._readable(request.token_ids[start : end - 1]))
                late_spans.append(Span.of(request, start, end - 1 - start))
                start = end - 1
            unread += self._readable(request.token_ids[start:end])
            spans.append(Span.of(request, start, end - start))
        self._runner.prefill(late_ids, late_spans)
        self._filled.update((b, self._block_manager.tenancy(b)) for b in filling)
        return torch.tensor(unread, dtype=torch.int64, device=batch.device), spans

    def _num_read(self, request: Request, filling: Container[int] = ()) -> int:
        """Committed tokens in the cache; of a new request, those in pages filled for others."""
        cached = self._num_cached.get(request.request_id)
        if cached is None:
            known = (b in filling or self._is_filled(b) for b in request.block_table)
            cached = sum(takewhile(bool, known)) * self._block_manager.block_size
        return min(cached, len(request.token_ids) - 1)

    def _is_filled(self, block_id: int) -> bool:
        return self._filled.get(block_id) == self._block_manager.tenancy(block_id)

    def _mark_filled(self, block_table: list[int], num_tokens: int) -> None:
        """Note the blocks that these tokens fill; what comes before a noted one is noted too."""
        for number in reversed(range(num_tokens // self._block_manager.block_size)):
            block_id = block_table[number]
            if self._is_filled(block_id):
                break
            self._filled[block_id] = self._block_manager.tenancy(block_id)

    def _readable(self, token_ids: list[int]) -> list[int]:
        """Ids that the draft model can embed; what it cannot read only costs it accuracy."""
        last = self._runner.vocab_size - 1
        return [min(token_id, last) for token_id in token_ids]

    def _room(self, request: Request) -> int:
        """Tokens that can be drafted before the draft model's last position."""
        last = self._runner.paged_model.max_positions
        return sys.maxsize if last is None else max(0, last - len(request.token_ids) + 1)

    def _greedy(self, batch: Batch) -> SamplingTensors:
        zeros = torch.zeros(len(batch.requests), device=batch.device)
        return SamplingTensors(temperature=zeros, top_k=None, top_p=None, min_p=None)

    def _index(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._runner.device)


def _take(sampling: SamplingTensors, chosen: slice | Tensor) -> SamplingTensors:
    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[chosen]

    return SamplingTensors(
        temperature=rows(sampling["temperature"]),
        top_k=rows(sampling["top_k"]),
        top_p=rows(sampling["top_p"]),
        min_p=rows(sampling["min_p"]),
    )
