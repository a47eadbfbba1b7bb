"""All decoding steps of a draft model as one CUDA graph: the host launches it and is free."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastspec.drafters.base import SamplingTensors
from fastspec.models.graphs import LEAST_WIDTH, MOST_TOKENS, Run, power_of_2
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
        graphs = self.runner.graphs
        if graphs is None or graphs.capture is None or graphs.inputs is not None:
            return None
        num_steps = numbers["uniforms"].shape[1]
        batch, ends = len(spans), [span.start + span.count for span in spans]
        width = -(-(max(map(sum, zip(ends, counts, strict=True))) - 1) // graphs.block_size)
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
        layouts = [lay_out(spans, rows, graphs.block_size, shape, num_tokens)]
        for step in range(1, num_steps):
            places = [end - 1 + min(step, num - 1) for end, num in zip(ends, counts, strict=True)]
            later = [span.part(place, 1) for span, place in zip(spans, places, strict=True)]
            wide, narrow = lay_out(later, [], graphs.block_size, chain.later_shape, 1)
            over = [num_rows + row for row, num in enumerate(counts) if step >= num]
            for slot in over:
                wide[slot] = -1  # nothing is written after the last token
            layouts.append((wide, narrow))
        chain.fill(input_ids, layouts, given)
        if chain.replay is None:
            try:
                chain.replay = graphs.capture(chain.run)
            except RuntimeError as error:
                graphs.give_up(error)
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
        shapes = [shape, *[self.later_shape] * (num_steps - 1)]
        wide_sizes = [shape.wide_size for shape in shapes]
        narrow_sizes = [shape.narrow_size for shape in shapes]
        self._ids = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
        self._wide = torch.zeros(sum(wide_sizes), dtype=torch.int64, device=device)
        self._narrow = torch.zeros(sum(narrow_sizes), dtype=torch.int32, device=device)
        parts = self._wide.split(wide_sizes), self._narrow.split(narrow_sizes)
        self._steps = [
            PagedStep.of(runner.caches, wide, narrow, of[0], of[1], model.backend, spans=[])
            for of, wide, narrow in zip(shapes, *parts, strict=True)
        ]
        self._given = {
            name: value.new_zeros((shape.num_rows, *value.shape[1:]))
            for name, value in given.items()
        }

    def fill(
        self,
        input_ids: Tensor,
        layouts: list[tuple[list[int], list[int]]],
        given: dict[str, Tensor],
    ) -> None:
        """Copy the padded layout of each step, and what tokens are drawn with, into the buffers."""
        device = self._ids.device
        self._ids[: len(input_ids)].copy_(input_ids)
        for buffer, parts in zip(
            (self._wide, self._narrow), zip(*layouts, strict=True), strict=True
        ):
            values = [value for part in parts for value in part]
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
