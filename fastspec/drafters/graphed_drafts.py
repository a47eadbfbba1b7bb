"""All decoding steps of a draft model as one CUDA graph: the host launches it and is free."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastspec.drafters.base import SamplingTensors
from fastspec.models.graphs import LEAST_WIDTH, MOST_TOKENS, Run, power_of_2, report_failure
from fastspec.models.layout import PagedStep, PassShape, Span, lay_out
from fastspec.models.reduced_vocabulary import DraftVocabulary
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor, host_tensor
from fastspec_kernels import sample, sample_coupled


class Drafts(NamedTuple):
    """What a draft model wrote: tokens [B, K] int32, and their logits [B, K, V'] if kept."""

    token_ids: Tensor
    logits: Tensor | None


def draw(
    logits: Tensor,
    numbers: dict[str, Tensor],
    step: int,
    sampling: SamplingTensors,
    vocabulary: DraftVocabulary,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Draw a token after each row of logits [R, V']; return tokens [R] and log-probabilities.

    Args:
        numbers: "uniforms" [R, K] float32, or also "seeds" and "lengths" [R] int64 to draw by
            position instead.
    """
    if "seeds" not in numbers:
        draws = numbers["uniforms"][:, step].contiguous()
        picked, logprobs = sample(logits, draws, **sampling, backend=backend)
        known = vocabulary.token_map is None
        return picked if known else vocabulary.tokens(picked), logprobs
    whole = vocabulary.whole(logits)  # noise belongs to token ids, not columns
    keys = numbers["seeds"], numbers["lengths"] + step
    return sample_coupled(whole, *keys, **sampling, backend=backend)


@dataclass(eq=False)
class GraphedDrafts:
    """The graphs of a draft model's steps, captured when a combination of sizes first occurs.

    Attributes:
        vocab_size: columns of the logits that are drawn from.
    """

    runner: ModelRunner
    vocabulary: DraftVocabulary
    vocab_size: int
    _chains: "dict[tuple, StaticChain]" = field(default_factory=dict, init=False)

    def write(
        self,
        input_ids: Tensor,
        spans: list[Span],
        counts: list[int],
        sampling: SamplingTensors,
        numbers: dict[str, Tensor],
        keeps_logits: bool,
    ) -> Drafts | None:
        """Read the spans' tokens [T] int64, and continue each text by counts[b] >= 1 of K tokens.

        From column counts[b] on, tokens are -1 and logits without a meaning. None if the steps must
        run one by one: the model is not captured, or reads too much at once.
        """
        runner, num_steps = self.runner, numbers["uniforms"].shape[1]
        filled = runner.drafting_spans(spans)
        if runner.capture is None or filled is None:
            return None
        batch, ends = len(spans), [span.start + span.count for span in filled]
        width = -(-(max(map(sum, zip(ends, counts, strict=True))) - 1) // runner.block_size)
        num_rows = power_of_2(batch)
        num_tokens = num_rows * power_of_2(-(-len(input_ids) // num_rows))
        if num_tokens > MOST_TOKENS:
            return None
        # Twice as many sequences as rows: one that is added takes the tokens that are added.
        shape = PassShape(2 * num_rows, num_tokens, num_rows, max(LEAST_WIDTH, power_of_2(width)))
        given = {**numbers, **{name: x for name, x in sampling.items() if x is not None}}
        given = cast(dict[str, Tensor], given)
        key = shape, num_steps, keeps_logits, *given
        if (chain := self._chains.get(key)) is None:
            self._chains[key] = chain = StaticChain(self, shape, num_steps, keeps_logits, given)
        rows = [count - 1 for count in accumulate(span.count for span in spans)]
        layouts = [lay_out(filled, rows, runner.block_size, shape, num_tokens)]
        glimpses = [runner.glimpse_values(filled, True)]
        for step in range(1, num_steps):
            places = [end - 1 + min(step, num - 1) for end, num in zip(ends, counts, strict=True)]
            later = [span.part(place, 1) for span, place in zip(spans, places, strict=True)]
            wide, narrow = lay_out(later, [], runner.block_size, chain.later_shape, 1)
            over = [num_rows + row for row, num in enumerate(counts) if step >= num]
            for slot in over:
                wide[slot] = -1  # nothing is written after the last token
            layouts.append((wide, narrow))
            glimpses.append(runner.glimpse_values(later, False))
        chain.fill(input_ids, layouts, glimpses, given)
        if chain.replay is None:
            try:
                chain.replay = runner.capture(chain.run)
            except RuntimeError as error:
                report_failure(runner.paged_model, runner.must_capture, error)
                runner.capture = None
                self._chains.clear()
                return None
        token_ids, logits = chain.replay()
        token_ids = token_ids[:batch].clone()
        if min(counts) < num_steps:
            columns = torch.arange(num_steps, device=token_ids.device)
            lengths = device_tensor(counts, torch.int64, token_ids.device)
            token_ids.masked_fill_(columns >= lengths[:, None], -1)
        return Drafts(token_ids, None if logits is None else logits[:batch].clone())


class StaticChain:
    """Buffers for all steps of one combination of sizes, which a graph reads at fixed addresses."""

    def __init__(
        self,
        drafts: GraphedDrafts,
        shape: PassShape,
        num_steps: int,
        keeps_logits: bool,
        given: dict[str, Tensor],
    ):
        self.replay: Run | None = None
        self.later_shape = PassShape(shape.num_rows, shape.num_rows, 0, shape.width)
        self._drafts, self._keeps_logits = drafts, keeps_logits
        runner = drafts.runner
        model, device = runner.paged_model, runner.device
        self._shapes = [shape, *[self.later_shape] * (num_steps - 1)]
        # Of each step the layout, then what its tokens and sequences read besides.
        wide_sizes = [x for of in self._shapes for x in (of.wide_size, of.num_tokens)]
        narrow_sizes = [x for of in self._shapes for x in (of.narrow_size, of.batch)]
        self._ids = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
        self._wide = torch.zeros(sum(wide_sizes), dtype=torch.int64, device=device)
        self._narrow = torch.zeros(sum(narrow_sizes), dtype=torch.int32, device=device)
        wide, narrow = self._wide.split(wide_sizes), self._narrow.split(narrow_sizes)
        parts = zip(self._shapes, wide[::2], narrow[::2], wide[1::2], narrow[1::2], strict=True)
        self._steps = []
        for number, (of, wide, narrow, per_token, per_sequence) in enumerate(parts):
            sizes = of.batch, of.num_tokens
            step = PagedStep.of(runner.caches, wide, narrow, *sizes, model.backend, spans=[])
            runner.set_glimpse(step, per_token, per_sequence, number == 0)
            self._steps.append(step)
        self._given = {
            name: value.new_zeros((shape.num_rows, *value.shape[1:]))
            for name, value in given.items()
        }

    def fill(
        self,
        input_ids: Tensor,
        layouts: list[tuple[list[int], list[int]]],
        glimpses: list[tuple[list[int], list[int]]],
        given: dict[str, Tensor],
    ) -> None:
        """Copy each step's padded layout and glimpse, and what draws tokens, into the buffers."""
        device, wide, narrow = self._ids.device, [], []
        for shape, layout, (per_token, per_sequence) in zip(
            self._shapes, layouts, glimpses, strict=True
        ):
            wide += layout[0] + per_token + [0] * (shape.num_tokens - len(per_token))
            narrow += layout[1] + per_sequence + [0] * (shape.batch - len(per_sequence))
        self._ids[: len(input_ids)].copy_(input_ids)
        for buffer, values in ((self._wide, wide), (self._narrow, narrow)):
            buffer.copy_(host_tensor(values, buffer.dtype, device), non_blocking=True)
        for name, value in given.items():
            self._given[name][: len(value)].copy_(value)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Run all steps on the buffers; return tokens [B, K] and their logits, if kept."""
        drafts, model = self._drafts, self._drafts.runner.paged_model
        names = "temperature", "top_k", "top_p", "min_p"
        sampling: Any = {name: self._given.get(name) for name in names}
        ids, tokens, rows = self._ids, [], []
        for number, step in enumerate(self._steps):
            keep = step.rows if number == 0 else None
            logits = model.forward(ids, step.positions, keep, step)[:, : drafts.vocab_size]
            given = logits, self._given, number, sampling
            picked, _ = draw(*given, drafts.vocabulary, model.backend)
            tokens.append(picked)
            rows.append(logits)
            ids = picked.clamp(min=0).long()
        return torch.stack(tokens, dim=1), torch.stack(rows, dim=1) if self._keeps_logits else None
