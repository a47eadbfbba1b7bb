"""All decoding steps of a draft as one CUDA graph: the host launches it and is free."""

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from fastspec.drafters.base import Drafts, SamplingTensors, draw
from fastspec.models.blocks import blocks_needed
from fastspec.models.graphs import (
    LEAST_WIDTH,
    MOST_TOKENS,
    RARE_FACTOR,
    RARE_TIMES,
    RecentGraphs,
    Run,
    is_near,
    padded,
    power_of_2,
)
from fastspec.models.layout import PagedStep, PassShape, Span, lay_out
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import StaticIntegers

MAX_CHAINS = 32  # graphs kept; the least recently used one is dropped
MAX_REQUESTS = 64  # with more, a pass keeps the GPU busy for longer than its launch takes the host
MAX_LOGIT_BYTES = 64 << 20  # logits kept by one graph


@dataclass(eq=False)
class GraphedDrafts:
    """The graphs of a draft model's steps, captured when sizes occur again and no graph is near.

    Attributes:
        vocab_size: columns of the logits that are drawn from.
    """

    runner: ModelRunner
    vocabulary: DraftVocabulary
    vocab_size: int
    _chains: "RecentGraphs[tuple, StaticChain]" = field(default_factory=RecentGraphs, init=False)

    def write(
        self,
        input_ids: list[int],
        spans: list[Span],
        counts: list[int],
        sampling: SamplingTensors,
        random_inputs: dict[str, Tensor],
        confidence_threshold: float | None,
        keeps_logits: bool,
    ) -> Drafts | None:
        """Read the spans' tokens, and continue each text by counts[b] >= 1 tokens.

        The result has max(counts) columns; from column counts[b] on, tokens are -1 and logits
        undefined. None if the steps must run pass by pass: the model is not captured, its runner
        refuses the spans (`ModelRunner.drafting_spans`), these sizes occur for the first time and
        there is no graph of near ones, a limit above is exceeded, or drafts end below a confidence,
        so that the host must read each step.

        Raises:
            ValueError: the model cannot be captured, but must be.
        """
        runner, num_steps = self.runner, max(counts)
        if confidence_threshold is not None:
            return None
        if (graphs := runner.graphs) is None or graphs.capture is None:
            self._chains.clear()
            return None
        if (filled := runner.drafting_spans(spans)) is None:
            return None
        ends = [span.start + span.count for span in filled]
        longest = max(map(sum, zip(ends, counts, strict=True))) - 1
        width = blocks_needed(longest, runner.block_size)
        num_rows = power_of_2(len(spans))
        num_tokens = num_rows * power_of_2(-(-len(input_ids) // num_rows))
        num_bytes = num_rows * num_steps * self.vocab_size * runner.paged_model.dtype.itemsize
        is_large = num_rows > MAX_REQUESTS or num_tokens > MOST_TOKENS
        if is_large or (keeps_logits and num_bytes > MAX_LOGIT_BYTES):
            return None
        # At least one sequence is padding, to which the padding tokens belong: hence 2 * num_rows.
        shape = PassShape(2 * num_rows, num_tokens, num_rows, max(LEAST_WIDTH, power_of_2(width)))
        uniforms = random_inputs["uniforms"][:, :num_steps]
        options = {**random_inputs, **sampling, "uniforms": uniforms}
        draw_inputs = {name: cast(Tensor, x) for name, x in options.items() if x is not None}
        key = shape, num_steps, keeps_logits, *draw_inputs
        if key not in self._chains:
            times = self._chains.occur(key)
            # Superfluous steps take time, but less than a capture.
            near = self._near(times <= RARE_TIMES, *key)
            if near is None and times == 1:
                return None
            key = near or key
        make = partial(StaticChain, self, shape, num_steps, keeps_logits, draw_inputs)
        chain = self._chains.use(key, make, MAX_CHAINS)
        chain.fill(input_ids, filled, counts, draw_inputs)
        if chain.replay is None:
            chain.replay = graphs.captured(chain.run)
        if chain.replay is None:
            return None
        token_ids, logits = chain.replay()
        token_ids = token_ids[: len(spans), :num_steps].clone()
        if min(counts) < num_steps:
            ends_before = chain.lengths[: len(spans), None] <= chain.columns[:num_steps]
            token_ids.masked_fill_(ends_before, -1)
        kept = None if logits is None else logits[: len(spans), :num_steps].clone()
        return token_ids, kept, counts

    def _near(
        self,
        is_rare: bool,
        shape: PassShape,
        num_steps: int,
        keeps_logits: bool,
        *draw_inputs: str,
    ) -> tuple | None:
        """Return the key of the smallest near graph, if any; only rare sizes take more steps."""
        found, most_steps = [], RARE_FACTOR * num_steps if is_rare else num_steps
        for key, chain in self._chains.items():
            larger, steps, *others = key
            is_like = others == [keeps_logits, *draw_inputs] and is_near(larger, shape, is_rare)
            if chain.replay is not None and is_like and num_steps <= steps <= most_steps:
                found.append(key)
        return min(found, key=lambda key: (key[1], key[0].num_tokens, key[0]), default=None)


class StaticChain:
    """Buffers for all steps of one combination of sizes, which a graph reads at fixed addresses."""

    def __init__(
        self,
        drafts: GraphedDrafts,
        shape: PassShape,
        num_steps: int,
        keeps_logits: bool,
        draw_inputs: dict[str, Tensor],
    ):
        self.replay: Run | None = None
        self._runner, self._vocabulary = drafts.runner, drafts.vocabulary
        self._vocab_size, self._shape, self._keeps_logits = drafts.vocab_size, shape, keeps_logits
        model, device, num_rows = drafts.runner.paged_model, drafts.runner.device, shape.num_rows
        num_later = num_steps - 1
        # int64: tokens, the first pass, per_token; of each later step positions, slots, per_token.
        wide = [shape.num_tokens, shape.wide_size, shape.num_tokens, num_later * 3 * num_rows]
        # int32: the first pass and per_sequence; draft lengths; then context_lens of later steps.
        narrow = [shape.narrow_size, shape.batch, num_rows, num_later * num_rows]
        self._inputs = StaticIntegers(sum(wide), sum(narrow), device)
        self.columns = torch.arange(num_steps, dtype=torch.int32, device=device)
        self._ids, first, per_token, later = self._inputs.wide.split(wide)
        sizes = shape.batch, shape.num_tokens, model.backend
        narrow_first, per_sequence, self.lengths, contexts = self._inputs.narrow.split(narrow)
        step = PagedStep.of(drafts.runner.caches, first, narrow_first, *sizes, spans=[])
        self._runner.set_draft_view(step, per_token, per_sequence, True)
        self._steps = [step]
        ends = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        later_steps = later.view(num_later, 3, num_rows), contexts.view(num_later, num_rows)
        for (positions, slots, per_token), context_lens in zip(*later_steps, strict=True):
            following = PagedStep(
                caches=step.caches,
                positions=positions,
                rows=step.rows[:0],
                block_table=step.block_table[:num_rows],
                context_lens=context_lens,
                cu_rows=ends,
                slot_mapping=slots,
                first_read_lens=step.first_read_lens[:num_rows],
                backend=model.backend,
            )
            self._runner.set_draft_view(following, per_token, per_sequence[:num_rows], False)
            self._steps.append(following)
        self._draw_inputs = {
            name: value.new_zeros((num_rows, *value.shape[1:]))
            for name, value in draw_inputs.items()
        }

    def fill(
        self,
        input_ids: list[int],
        spans: list[Span],
        counts: list[int],
        draw_inputs: dict[str, Tensor],
    ) -> None:
        """Copy the padded layout, and what tokens are drawn with, into the buffers."""
        runner, shape, size = self._runner, self._shape, self._runner.block_size
        rows = [count - 1 for count in accumulate(span.count for span in spans)]
        wide, narrow = lay_out(spans, rows, size, shape)
        per_token, per_sequence = runner.draft_view_values(spans, True)
        wide = padded(input_ids, shape.num_tokens) + wide
        wide += padded(per_token, shape.num_tokens)
        narrow += padded(per_sequence, shape.batch) + padded(counts, shape.num_rows)
        last = [span.start + span.count - 1 for span in spans]
        for step in range(1, len(self._steps)):
            # A draft that has ended repeats its last position and writes nothing (slot -1).
            places = [end + min(step, num - 1) for end, num in zip(last, counts, strict=True)]
            later = [span.part(place, 1) for span, place in zip(spans, places, strict=True)]
            slots = [
                span.slot(place, size) if step < num else -1
                for span, place, num in zip(later, places, counts, strict=True)
            ]
            wide += padded(places, shape.num_rows) + padded(slots, shape.num_rows, -1)
            wide += padded(runner.draft_view_values(later, False)[0], shape.num_rows)
            narrow += padded([place + 1 for place in places], shape.num_rows, 1)
        self._inputs.replace(wide, narrow)
        for name, value in draw_inputs.items():
            part = tuple(map(slice, value.shape))
            self._draw_inputs[name][part].copy_(value)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Run all steps on the buffers; return tokens [B, K] and their logits, if kept."""
        model, names = self._runner.paged_model, SamplingTensors.__annotations__
        sampling: Any = {name: self._draw_inputs.get(name) for name in names}
        ids, tokens, kept = self._ids, [], []
        for number, step in enumerate(self._steps):
            rows = step.rows if number == 0 else None
            logits = model.forward(ids, step.positions, rows, step)[:, : self._vocab_size]
            picked, _ = draw(
                logits, self._draw_inputs, number, sampling, self._vocabulary, model.backend
            )
            tokens.append(picked)
            if self._keeps_logits:
                kept.append(logits)
            ids = picked.clamp(min=0).long()
        return torch.stack(tokens, dim=1), torch.stack(kept, dim=1) if kept else None
