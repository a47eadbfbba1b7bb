"""All decoding steps of a draft as one call, on a CPU: between its kernels there is no Python."""

from itertools import accumulate

import torch
from torch import Tensor

from fastspec.drafters.base import SamplingTensors
from fastspec.drafters.graphed_drafts import Drafts
from fastspec.models.layout import Span
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import PACKED_TILE, draft_chain


class DraftChains:
    """Drafts by `draft_chain`, with models that it can run.

    Args:
        num_columns: columns of the logits that are drawn from.
    """

    def __init__(self, runner: ModelRunner, num_columns: int):
        self._runner, self._num_columns = runner, num_columns
        self._parts = parts = runner.paged_model.chain_parts()
        if parts is not None and (head := parts.weights.head).dtype == torch.uint8:
            tiles = -(-num_columns // PACKED_TILE)  # a larger vocabulary's tokens are not drawn
            self._weights = parts.weights._replace(head=head[:tiles])
        elif parts is not None:
            self._weights = parts.weights

    def write(
        self,
        input_ids: list[int],
        spans: list[Span],
        counts: list[int],
        sampling: SamplingTensors,
        uniforms: Tensor,
        threshold: float | None,
        keeps_logits: bool,
    ) -> Drafts | None:
        """Read the spans' tokens, and continue each text by up to counts[b] >= 1 tokens.

        None if the steps must run pass by pass.

        Args:
            uniforms: [B, K] float32, where K is max(counts) or more.
            threshold: a draft ends where its joint probability falls below; None = never.
        """
        runner, parts = self._runner, self._parts
        if parts is None or len(input_ids) > runner.paged_model.most_flat_rows:
            return None
        ends = [span.start + span.count + count for span, count in zip(spans, counts, strict=True)]
        factors = (None, None) if parts.table is None else parts.table.kept(max(ends))
        if factors is None or (inputs := runner.chain_inputs(spans)) is None:
            return None
        filled, (cos, sin) = inputs.spans, factors
        lens = [span.start + span.count for span in filled]
        num_read = max(length + count - 1 for length, count in zip(lens, counts, strict=True))
        width, batch = -(-num_read // runner.block_size), len(filled)
        narrow = [*lens, *accumulate((span.count for span in filled), initial=0), *counts]
        for span in filled:
            table = span.block_table[:width]
            narrow += table + [-1] * (width - len(table))
        packed = device_tensor(narrow, torch.int32, runner.device)
        context_lens, cu_rows, num_tokens, tables = packed.tensor_split(
            (batch, 2 * batch + 1, 3 * batch + 1)
        )
        caches = [runner.caches[layer] for layer in parts.layers]
        token_ids, ended, logits = draft_chain(
            device_tensor(input_ids, torch.int64, runner.device),
            self._weights,
            [keys for keys, _ in caches],
            [values for _, values in caches],
            tables.view(batch, width),
            context_lens,
            cu_rows,
            num_tokens,
            uniforms[:, : max(counts)].contiguous(),
            num_columns=self._num_columns,
            cos=cos,
            sin=sin,
            states=inputs.states,
            own_states=inputs.own_states,
            least_probability=threshold or 0.0,
            keeps_logits=keeps_logits,
            backend=runner.paged_model.backend,
            **sampling,
            **parts.options,
        )
        return Drafts(token_ids, logits if keeps_logits else None, ended.tolist())
