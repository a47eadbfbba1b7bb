"""Drafting with DFlash: one pass guesses all tokens of a draft."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import log

import torch
from torch import Tensor

from fastspec.config import EngineConfig
from fastspec.drafters.base import (
    Drafter,
    Drafts,
    Request,
    SamplingTensors,
    draw,
    sampling_of_rows,
)
from fastspec.drafters.context import DrafterContext, DrafterPlan
from fastspec.drafters.dflash.loading import load_dflash
from fastspec.drafters.dflash.model import BlockView, DFlashDraft
from fastspec.drafters.logit_rules import Rows
from fastspec.drafters.target_reader import TargetReader
from fastspec.models.blocks import blocks_needed
from fastspec.models.layout import KVCache, PagedStep, Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor


class DFlashRunner(ModelRunner):
    """Runs a DFlash draft: rows of tokens that the target has read, and then those of blocks.

    The target's tokens fill the slots of their text. A block begins in the slots after them, and
    goes on in blocks of the cache that are beyond those of any text, as its tokens are only guesses
    and may be more than the text has room for.
    """

    why_not_captured = "drafts whole blocks, whose rows are laid out anew in each pass"

    def __init__(
        self, paged_model: PagedModel, inputs: KVCache, num_blocks: int, config: EngineConfig
    ):
        self._inputs_read = [half.view(-1, *half.shape[2:]) for half in inputs]  # by slot
        self.block_len: int = paged_model.model.config.block_size
        self._first_beyond = num_blocks
        self._blocks_each = blocks_needed(self.block_len, config.block_size)
        num_blocks += config.max_batch_size * self._blocks_each
        super().__init__(paged_model, num_blocks, config)

    def with_block(self, index: int, span: Span) -> Span:
        """Return the span of a text's unread tokens, the last of which begins block `index`."""
        length = span.start + span.count
        first = self._first_beyond + index * self._blocks_each
        own = span.block_table[: blocks_needed(length, self.block_size)]
        table = [*own, *range(first, first + self._blocks_each)]
        return span._replace(block_table=table, count=span.count + self.block_len - 1)

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step = super()._step(spans, rows)
        known: list[int] = []  # rows of tokens that the target has read
        guessed: list[int] = []
        counts = [
            span.count - min(span.count, max(0, span.target_len - span.start)) for span in spans
        ]
        ends = accumulate(span.count for span in spans)
        for span, count, end in zip(spans, counts, ends, strict=True):
            known += range(end - span.count, end - count)
            guessed += range(end - count, end)
        places = {row: place for place, row in enumerate(guessed)}
        order = device_tensor([*known, *guessed], torch.int64, self.device)
        owners = device_tensor([i for i, n in enumerate(counts) if n], torch.int64, self.device)
        starts = [0, *accumulate(filter(None, counts))]
        slots = step.slot_mapping[order]
        blocks = replace(
            step,
            block_table=step.block_table[owners],
            context_lens=step.context_lens[owners],
            cu_rows=device_tensor(starts, torch.int32, self.device),
            slot_mapping=slots[len(known) :],
        )
        read = slots[: len(known)]
        states = torch.cat([half.index_select(0, read) for half in self._inputs_read], dim=-1)
        kept = device_tensor([places[row] for row in rows], torch.int64, self.device)
        step.target_view = BlockView(states.flatten(1), order, blocks, kept)
        return step


class DFlashDrafter(TargetReader):
    """Drafts with a DFlash draft model; from now on the target's runner keeps hidden states.

    A draft's tokens are drawn independently of each other, all from one pass, so how many are
    wanted changes neither their distributions nor its cost, except for the head's. Its arguments
    are those of `fastspec.drafters.target_reader.TargetReader`.

    Source: see `DFlashDraft`.
    """

    name, most_passes = "dflash", 1
    kind, needs_whole_target = "DFlash", True
    model_class, runner_class = DFlashDraft, DFlashRunner
    runner: DFlashRunner

    def room(self, length: int) -> int:
        """See `DraftModelDrafter.room`; a block has no more tokens than it was trained with."""
        return min(super().room(length), self.runner.block_len - 1)

    def write(self, requests: Sequence[Request], texts: list[list[int]], *args, **kwargs) -> Drafts:
        written = super().write(requests, texts, *args, **kwargs)
        for request, text in zip(requests, texts, strict=True):
            self.shorten(request.request_id, min(request.num_cached, len(text) - 1))
        return written

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
        if not spans:
            return torch.empty((0, 0), dtype=torch.int32, device=self.runner.device), None, []
        num = max(counts)
        logits = self._read_blocks(input_ids, spans, num)
        if any(request.rules is not None for request in requests):
            given = requests, texts, counts
            token_ids, logprobs, logits = self._drawn_by_rules(
                *given, logits, sampling, random_inputs
            )
        else:
            token_ids, logprobs = self._drawn(logits, sampling, random_inputs)
        if self._threshold:
            # A draft ends with the token that makes it unsure.
            is_sure = logprobs.cumsum(dim=1) >= log(self._threshold)
            sure = is_sure.cumprod(dim=1).sum(dim=1).tolist()
            counts = [min(count, 1 + n) for count, n in zip(counts, sure, strict=True)]
        wanted = device_tensor(counts, torch.int64, logits.device)[:, None]
        is_left_out = torch.arange(num, device=logits.device) >= wanted
        token_ids = token_ids.int().masked_fill(is_left_out, -1)
        return token_ids, logits if keeps_logits else None, counts

    def _read_blocks(self, input_ids: Tensor | list[int], spans: list[Span], num: int) -> Tensor:
        """Read the texts' unread tokens, which end with the first of a block; return the logits
        [B, N, V'] of the next ones of each block."""
        mask_id: int = self.runner.paged_model.model.config.mask_token_id
        masks = [mask_id] * (self.runner.block_len - 1)
        ids: list[int] = []
        rows: list[int] = []
        begin = 0
        for span in spans:
            ids += [*input_ids[begin : begin + span.count], *masks]
            rows += range(len(ids) - len(masks), len(ids) - len(masks) + num)
            begin += span.count
        whole = [self.runner.with_block(index, span) for index, span in enumerate(spans)]
        logits = self.runner.forward(ids, whole, rows)[:, : self._vocab_size]
        return logits.unflatten(0, (len(spans), num))

    def _drawn(
        self, logits: Tensor, sampling: SamplingTensors, random_inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Draw a token of each row of logits [B, N, V'] at once; return tokens and their
        log-probabilities [B, N]."""
        shape = batch, num = logits.shape[:2]
        rows = torch.arange(batch, device=logits.device).repeat_interleave(num)
        places = torch.arange(num, device=logits.device).repeat(batch)
        own = {name: value[rows] for name, value in random_inputs.items()}
        own["uniforms"] = own["uniforms"].gather(1, places[:, None])
        if "lengths" in own:
            own["lengths"] = own["lengths"] + places
        parameters, backend = sampling_of_rows(sampling, rows), self.runner.paged_model.backend
        picked, logprobs = draw(logits.flatten(0, 1), own, 0, parameters, self.vocabulary, backend)
        return picked.view(shape), logprobs.view(shape)

    def _drawn_by_rules(
        self,
        requests: list[Request],
        texts: list[list[int]],
        counts: list[int],
        logits: Tensor,
        sampling: SamplingTensors,
        random_inputs: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_drawn`; each draft's tokens one by one, as rules depend on those before. Also
        return the logits [B, N, V'] that the rules make, of the tokens that are wanted."""
        device, backend = logits.device, self.runner.paged_model.backend
        num = logits.shape[1]
        path = self._path(requests, texts, num)
        ends = [len(text) - len(r.token_ids) for r, text in zip(requests, texts, strict=True)]
        picked = torch.full(logits.shape[:2], -1, dtype=torch.int32, device=device)
        logprobs, ruled = torch.zeros(picked.shape, device=device), logits.float()
        for step in range(num):
            owners = [b for b, count in enumerate(counts) if count > step]
            nodes = [ends[b] + step for b in owners]
            places = device_tensor([owners, nodes], torch.int64, device)
            chosen = places[0]
            row = self.ruled(requests, logits[chosen, step], Rows(owners, nodes, path))
            own = {name: value[chosen] for name, value in random_inputs.items()}
            parameters = sampling_of_rows(sampling, chosen)
            tokens, own_logprobs = draw(row, own, step, parameters, self.vocabulary, backend)
            ruled[chosen, step] = row.float()
            picked[chosen, step], logprobs[chosen, step] = tokens.int(), own_logprobs.float()
            path[chosen, places[1] + 1] = tokens.int()
        return picked, logprobs, ruled


def build(context: DrafterContext) -> Drafter | DrafterPlan:
    """Build method "dflash"; a given Drafter must be of its own class."""
    spec = context.spec
    if spec.drafts_trees or spec.cape or spec.copies_target:
        what = "in a cascade" if spec.copies_target else "for trees"
        raise ValueError(f"drafter: a DFlash draft guesses whole chains, so it cannot draft {what}")
    context = replace(context, tokenizer=None)  # the draft model has none of its own
    plan = DFlashDrafter.plan(context, load_dflash)
    if isinstance(plan, DrafterPlan):
        [model] = plan.models
        size = context.config.block_size
        beyond = blocks_needed(model.model.config.block_size, size) * size
        model.bytes_per_sequence = beyond * model.bytes_per_token()
    return plan
