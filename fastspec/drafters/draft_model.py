"""A smaller model as drafter: K decoding steps on its own paged cache, without host syncs."""

import sys
from collections.abc import Sequence
from itertools import accumulate, takewhile
from math import inf, log

import torch
from torch import Tensor

from fastspec.drafters.base import (
    DRAFT_STREAM,
    Batch,
    Drafter,
    Drafts,
    Proposal,
    Request,
    SamplingTensors,
    draw,
    greedy_sampling,
    sampling_of_rows,
)
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.graphed_drafts import GraphedDrafts
from fastspec.drafters.logit_rules import Rows, apply_rules, without_forbidden
from fastspec.drafters.single_call_drafts import single_call_drafts
from fastspec.models.blocks import Blocks
from fastspec.models.layout import Span
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor, padded_tensor

_PREFILL_FROM = 8  # this many uncached tokens are read in a separate pass, without logits


class DraftModelDrafter:
    """Drafts with a language model that has the target's tokenizer.

    With a confidence threshold, a draft ends with the token that brings the joint probability of
    its tokens, under the distribution they were drawn from (temperature 1 for greedy requests),
    below the threshold. Its end depends only on tokens that the target sees, so sampling stays
    exact.

    Its cache uses the target's block tables, so a request's pages have the same ids in both caches
    and rolling back costs nothing. It tracks itself which pages it has filled: a page that the
    target shares between requests may not contain the draft model's keys and values yet.
    """

    name = "draft_model"
    most_passes = sys.maxsize  # of a draft, otherwise one for each token
    keeps_drafts = True  # in its cache; otherwise it rereads accepted tokens
    reads_target = False

    def __init__(
        self,
        runner: ModelRunner,
        block_manager: Blocks,
        target_vocab_size: int,
        probabilistic: bool,
        confidence_threshold: float | None = None,
    ):
        self.runner = runner
        self._block_manager = block_manager
        self._vocab_size = min(runner.vocab_size, target_vocab_size)
        self.vocabulary = runner.paged_model.use_own_columns(target_vocab_size)
        self.is_probabilistic = probabilistic
        self._threshold = confidence_threshold
        self._graphed = GraphedDrafts(runner, self.vocabulary, self._vocab_size)
        self._single_call = single_call_drafts(runner, self._vocab_size)
        self._num_cached: dict[str, int] = {}
        self._filled: dict[int, int] = {}  # by block id, the block's tenancy when it was filled

    def propose(self, batch: Batch) -> Proposal:
        texts = [request.token_ids for request in batch.requests]
        num_draft_tokens = [
            min(wanted, self.room(len(text)))
            for text, wanted in zip(texts, batch.num_draft_tokens, strict=True)
        ]
        if self.is_probabilistic:
            sampling = batch.sampling
        else:
            sampling = greedy_sampling(len(texts), batch.device)
        num = batch.num_speculative_tokens
        uniforms = batch.sampling_uniforms(num, DRAFT_STREAM)
        keys = batch.keys if batch.is_coupled else None
        keeps_logits = self.is_probabilistic and not batch.all_greedy and keys is None
        token_ids, draft_logits, counts = self.write(
            batch.requests, texts, num_draft_tokens, sampling, uniforms, keeps_logits, keys
        )
        passes = [{self.name: min(count, self.most_passes)} for count in counts]
        is_usual = self._threshold is None and num_draft_tokens == batch.num_draft_tokens
        num_tokens = None if is_usual else counts
        token_map = None if draft_logits is None else self.vocabulary.token_map
        return Proposal(
            token_ids,
            draft_logits=draft_logits,
            draft_token_map=token_map,
            num_tokens=num_tokens,
            passes=passes,
        )

    def write(
        self,
        requests: Sequence[Request],
        texts: list[list[int]],
        num_draft_tokens: list[int],
        sampling: SamplingTensors,
        uniforms: Tensor,
        keeps_logits: bool,
        coupled_keys: Tensor | None = None,
    ) -> Drafts:
        """Continue each text by num_draft_tokens[b] tokens, one pass each, or until unsure.

        Args:
            texts: the committed tokens of each request, followed by drafts, if any.
            uniforms: [B, K] float32, one for each token.
            coupled_keys: [2, B] int64, seeds and lengths, to draw tokens by position instead; texts
                are then only the committed tokens.
        Returns:
            See `Drafts`, with up to K tokens; the logits are in the columns of `vocabulary`.
        """
        drafting = [b for b, num in enumerate(num_draft_tokens) if num]
        random_inputs = {"uniforms": uniforms}
        if coupled_keys is not None:
            seeds, lengths = coupled_keys
            random_inputs |= {"seeds": seeds, "lengths": lengths}
        places: slice | Tensor = slice(None)
        if len(drafting) < len(texts):
            places = device_tensor(drafting, torch.int64, uniforms.device)
            sampling = sampling_of_rows(sampling, places)
            random_inputs = {name: value[places] for name, value in random_inputs.items()}
        own_requests, own_texts = [requests[b] for b in drafting], [texts[b] for b in drafting]
        counts = [num_draft_tokens[b] for b in drafting]
        unread, spans = self._unread(own_requests, own_texts, [1] * len(drafting))
        drafts = None
        writer = self._single_call if self.runner.graphs is None else self._graphed
        has_rules = any(request.rules is not None for request in own_requests)
        inputs = unread, spans, counts, sampling, random_inputs
        is_usual = not has_rules and self.runner.paged_model.ranks is None
        if drafting and is_usual and writer is not None:
            drafts = writer.write(*inputs, self._threshold, keeps_logits)
        if drafts is None:
            drafts = self._write_by_passes(own_requests, own_texts, *inputs, keeps_logits)
        token_ids, draft_logits, counts = drafts
        for request, text, count in zip(own_requests, own_texts, counts, strict=True):
            num_kept = count - 1 if self.keeps_drafts else 0
            self._num_cached[request.request_id] = len(text) + num_kept
        # GPU kernels may be compiled for each width at its first use, so there it is always K.
        width = uniforms.shape[1] if uniforms.is_cuda else token_ids.shape[1]
        if token_ids.shape == (len(texts), width):
            return drafts
        num_drafted = [0] * len(texts)
        for b, count in zip(drafting, counts, strict=True):
            num_drafted[b] = count
        shape, columns = (len(texts), width), slice(token_ids.shape[1])
        whole_ids, whole_logits = token_ids.new_full(shape, -1), None
        whole_ids[places, columns] = token_ids
        if draft_logits is not None:
            whole_logits = draft_logits.new_zeros((*shape, draft_logits.shape[2]))
            whole_logits[places, columns] = draft_logits
        return whole_ids, whole_logits, num_drafted

    def _write_by_passes(
        self,
        requests: list[Request],
        texts: list[list[int]],
        input_ids: Tensor | list[int],
        spans: list[Span],
        counts: list[int],
        sampling: SamplingTensors,
        random_inputs: dict[str, Tensor],
        keeps_logits: bool,
    ) -> Drafts:
        """Write what `GraphedDrafts.write` writes in one go, also by rules of requests, on several
        ranks and down to a confidence; nothing for no texts.

        requests, texts: see `write`; the spans are what is unread of the texts, and counts >= 1.
        """
        device, backend = self.runner.device, self.runner.paged_model.backend
        ranks = self.runner.paged_model.ranks
        shape = len(texts), max(counts, default=0)
        token_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        chain_logprobs = torch.zeros(len(texts), dtype=torch.float32, device=device)
        draft_logits = path = None
        if any(request.rules is not None for request in requests):
            path = self._path(requests, texts, shape[1])
        least_logprob = log(self._threshold) if self._threshold else -inf
        counts = [*counts]  # lowered for drafts that end early
        drafting = [*range(len(texts))]
        for step in range(shape[1]):
            if not drafting:
                break
            chosen, row_sampling = slice(None), sampling
            if len(drafting) < len(texts):
                chosen = device_tensor(drafting, torch.int64, device)
                row_sampling = sampling_of_rows(sampling, chosen)
            own = {name: value[chosen] for name, value in random_inputs.items()}
            rows = [end - 1 for end in accumulate(span.count for span in spans)]
            logits = self.runner.forward(input_ids, spans, rows)[:, : self._vocab_size]
            if path is not None:
                nodes = [len(texts[b]) - len(requests[b].token_ids) + step for b in drafting]
                places = device_tensor([drafting, nodes], torch.int64, device)
                logits = self.ruled(requests, logits, Rows(drafting, nodes, path))
            picked, logprobs = draw(logits, own, step, row_sampling, self.vocabulary, backend)
            if ranks is not None:  # all ranks must run the next pass on the same tokens
                picked = ranks.broadcast(picked)
            token_ids[chosen, step] = picked
            if path is not None:
                path[places[0], places[1] + 1] = picked
            if keeps_logits:
                if draft_logits is None:
                    draft_logits = logits.new_zeros((*shape, logits.shape[1]))
                draft_logits[chosen, step] = logits
            if self._threshold is not None and step + 1 < shape[1]:
                chain_logprobs[chosen] += logprobs
                is_sure = chain_logprobs[chosen] >= least_logprob
                is_sure = (is_sure if ranks is None else ranks.broadcast(is_sure.int())).tolist()
                for b, sure in zip(drafting, is_sure, strict=True):
                    if not sure:
                        counts[b] = step + 1
            keep = [place for place, b in enumerate(drafting) if counts[b] > step + 1]
            if 0 < len(keep) < len(drafting):
                picked = picked[device_tensor(keep, torch.int64, device)]
            drafting = [drafting[place] for place in keep]
            spans = [spans[p].part(spans[p].start + spans[p].count, 1) for p in keep]
            input_ids = picked.clamp(min=0).to(torch.int64)
        return token_ids, draft_logits, counts

    def read(
        self, requests: Sequence[Request], texts: list[list[int]], num_rows: list[int]
    ) -> Tensor:
        """Return packed logits [R, V'] after each of the last num_rows[b] tokens of each text.

        They are in the columns of `vocabulary`.
        """
        ids, spans = self._unread(requests, texts, num_rows)
        ends = accumulate(span.count for span in spans)
        pairs = zip(ends, filter(None, num_rows), strict=True)
        rows = [row for end, count in pairs for row in range(end - count, end)]
        for request, text, count in zip(requests, texts, num_rows, strict=True):
            if count:
                self._num_cached[request.request_id] = len(text)
        logits = self.runner.forward(ids, spans, rows)[:, : self._vocab_size]
        if all(request.rules is None for request in requests):
            return logits
        path = self._path(requests, texts)
        ends = [len(text) - len(r.token_ids) + 1 for r, text in zip(requests, texts, strict=True)]
        pairs = list(enumerate(zip(ends, num_rows, strict=True)))
        owners = [b for b, (_, count) in pairs for _ in range(count)]
        nodes = [node for _, (end, count) in pairs for node in range(end - count, end)]
        return self.ruled(requests, logits, Rows(owners, nodes, path))

    def shorten(self, request_id: str, length: int) -> None:
        """Note that only the first `length` tokens that were read are still in the text."""
        if request_id in self._num_cached:
            self._num_cached[request_id] = min(self._num_cached[request_id], length)

    def room(self, length: int) -> int:
        """Return how many tokens fit between a text of this length and the last position."""
        last = self.runner.paged_model.max_positions
        return sys.maxsize if last is None else max(0, last - length + 1)

    def commit(self, batch: Batch, accepted: list[int]) -> None:
        tenancy, block_size = self._block_manager.tenancy, self._block_manager.block_size
        for request in batch.requests:
            if (cached := self._num_cached.get(request.request_id)) is None:
                continue
            cached = min(cached, len(request.token_ids) - 1)
            self._num_cached[request.request_id] = cached
            for block_id in reversed(request.block_table[: cached // block_size]):
                if self._filled.get(block_id) == tenancy(block_id):
                    break  # all blocks before a recorded one are recorded as well
                self._filled[block_id] = tenancy(block_id)

    def release(self, request: Request) -> None:
        self._num_cached.pop(request.request_id, None)

    def _path(self, requests: Sequence[Request], texts: list[list[int]], room: int = 0) -> Tensor:
        """Return [B, N + room] int32: the texts' tokens from the last committed one on, then -1."""
        ends = [text[len(r.token_ids) - 1 :] for r, text in zip(requests, texts, strict=True)]
        width = max(map(len, ends)) + room
        return padded_tensor(ends, width, self.runner.device)

    def ruled(self, requests: Sequence[Request], logits: Tensor, rows: Rows) -> Tensor:
        """Apply the requests' logit rules to rows in the columns of `vocabulary`."""
        texts = [request.token_ids for request in requests]
        rules, backend = [r.rules for r in requests], self.runner.paged_model.backend
        whole = self.vocabulary.whole(logits)
        whole, bitmask, dead = apply_rules(texts, rules, whole, rows, backend)
        logits = self.vocabulary.own(without_forbidden(whole, bitmask))
        for row in dead:
            logits[row] = torch.nan  # nothing is drafted there
        return logits

    def _unread(
        self, requests: Sequence[Request], texts: list[list[int]], num_rows: list[int]
    ) -> tuple[list[int], list[Span]]:
        """Return the texts' uncached tokens, always including the last num_rows[b] > 0.

        Long stretches, except the last tokens, are read here without logits. They are packed in
        order, so a request can build on blocks that an earlier one is about to fill.
        """
        tenancy, block_size = self._block_manager.tenancy, self._block_manager.block_size
        last_id = self.runner.vocab_size - 1  # tokens it cannot embed only cost accuracy
        unread: list[int] = []
        spans, late_ids, late_spans = [], [], []
        filling: set[int] = set()
        for request, token_ids, rows in zip(requests, texts, num_rows, strict=True):
            if not rows:
                continue
            start, most = self._num_cached.get(request.request_id), len(token_ids) - rows
            if start is None:  # a new request: others may have filled its first blocks
                known = (
                    b in filling or self._filled.get(b) == tenancy(b) for b in request.block_table
                )
                start = sum(takewhile(bool, known)) * block_size
            start = self.runner.paged_model.resume(request.state_key, min(start, most))
            if most - start >= _PREFILL_FROM:
                settled = min(most, len(request.token_ids) - 1) // block_size
                filling.update(request.block_table[:settled])
                late_ids.append([min(token_id, last_id) for token_id in token_ids[start:most]])
                late_spans.append(request.span(start, most - start))
                start = most
            unread += [min(token_id, last_id) for token_id in token_ids[start:]]
            spans.append(request.span(start, len(token_ids) - start))
        if late_ids:
            self.runner.prefill(late_ids, late_spans)
        self._filled.update((b, tenancy(b)) for b in filling)
        return unread, spans


def draft_model_of(drafter: Drafter | None) -> DraftModelDrafter | None:
    """Return the drafter itself or its attribute `draft` if that is a draft model, else None."""
    model = getattr(drafter, "draft", drafter)
    return model if isinstance(model, DraftModelDrafter) else None


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build method "draft_model"; a given Drafter is used as it is."""
    if isinstance(context.drafter, Drafter):
        return context.drafter
    model = context.load(context.drafter)
    options = context.spec.draws_drafts, context.spec.confidence_threshold

    def drafter(target: ModelRunner | None, block_manager: Blocks) -> Drafter:
        runner = context.runner(model, block_manager)
        return DraftModelDrafter(runner, block_manager, context.vocab_size, *options)

    return DrafterPlan([model], drafter)
