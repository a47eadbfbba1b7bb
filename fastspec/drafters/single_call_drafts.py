"""All decoding steps of a draft as one call, on a CPU: no Python runs between its kernels."""

from itertools import accumulate

import torch
from torch import Tensor

from fastspec.drafters.base import Drafts, SamplingTensors
from fastspec.models.flat import ChainParts
from fastspec.models.layout import Span
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import PACKED_TILE, draft_chain


class SingleCallDrafts:
    """Drafts by `draft_chain`.

    Args:
        parts: those of the runner's model.
        num_columns: columns of the logits that are drawn from.
    """

    def __init__(self, runner: ModelRunner, parts: ChainParts, num_columns: int):
        self._runner, self._parts, self._num_columns = runner, parts, num_columns
        caches = [runner.caches[layer] for layer in parts.layers]
        self._caches = [keys for keys, _ in caches], [values for _, values in caches]
        self._weights = weights = parts.weights
        if weights.head.dtype == torch.uint8:  # the op takes no more tiles than columns need
            tiles = -(-num_columns // PACKED_TILE)
            self._weights = weights._replace(head=weights.head[:tiles])

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
        """Read the spans' tokens, and continue each text by up to counts[b] >= 1 tokens.

        The arguments and the result are those of `GraphedDrafts.write`. None if the steps must run
        pass by pass: the first one is too long, tokens are drawn by position, rotation factors are
        not cached up to the draft's end (`RotaryTable`), passes also keep layers' inputs for
        another draft, or the runner refuses the spans (`ModelRunner.chain_states`).
        """
        runner, parts, rotary = self._runner, self._parts, self._parts.table
        if len(input_ids) > runner.paged_model.most_flat_rows or "seeds" in random_inputs:
            return None
        num_read = [x.start + x.count + num - 1 for x, num in zip(spans, counts, strict=True)]
        if runner.inputs is not None or (rotary is not None and max(num_read) > len(rotary.cos)):
            return None
        filled, hidden, hidden_cache = spans, None, None
        if self._weights.embedding_norm is not None:
            if (inputs := runner.chain_states(spans)) is None:
                return None
            filled, hidden, hidden_cache = inputs
        batch = len(filled)
        lens = [span.start + span.count for span in filled]
        width = -(-max(num_read) // runner.block_size)  # EAGLE's rows are one slot earlier
        narrow = [*lens, *accumulate((span.count for span in filled), initial=0), *counts]
        for span in filled:
            blocks = span.block_table[:width]
            narrow += blocks + [-1] * (width - len(blocks))
        packed = device_tensor(narrow, torch.int32, runner.device)
        sizes = batch, batch + 1, batch, batch * width
        context_lens, cu_rows, num_tokens, block_table = packed.split(sizes)
        token_ids, num_drawn, logits = draft_chain(
            device_tensor(input_ids, torch.int64, runner.device),
            self._weights,
            *self._caches,
            block_table.view(batch, width),
            context_lens,
            cu_rows,
            num_tokens,
            random_inputs["uniforms"][:, : max(counts)].contiguous(),
            num_columns=self._num_columns,
            cos=None if rotary is None else rotary.cos,
            sin=None if rotary is None else rotary.sin,
            hidden=hidden,
            hidden_cache=hidden_cache,
            confidence_threshold=confidence_threshold or 0.0,
            keeps_logits=keeps_logits,
            backend=runner.paged_model.backend,
            **sampling,
            **parts.options,
        )
        if confidence_threshold is not None:
            counts = num_drawn.tolist()
        return token_ids, logits if keeps_logits else None, counts


def single_call_drafts(runner: ModelRunner, vocab_size: int) -> SingleCallDrafts | None:
    """Return what drafts with a runner's model; None if `draft_chain` does not compute it."""
    if (parts := runner.paged_model.chain_parts()) is None:
        return None
    return SingleCallDrafts(runner, parts, min(vocab_size, runner.paged_model.num_columns))
