"""Forward passes of one model over packed, ragged batches of sequences in the paged cache."""

import torch
from torch import Tensor

from fastspec.paged_model import PagedModel, PagedStep, Span
from fastspec.token_tree import TreeLayout
from fastspec_kernels import compact_kv


class ModelRunner:
    """One model with its caches; block tables come from outside, so models can share them."""

    def __init__(self, paged_model: PagedModel, num_blocks: int, block_size: int, chunk_size: int):
        self.paged_model = paged_model
        self.device = paged_model.device
        self.vocab_size = paged_model.vocab_size
        self._cache_stacks = paged_model.new_caches(num_blocks, block_size)
        self.caches = {k: v for stack in self._cache_stacks for k, v in stack.by_layer().items()}
        self._block_size = block_size
        self._chunk_size = chunk_size

    def forward(
        self,
        input_ids: Tensor,
        spans: list[Span],
        rows: list[int] | None = None,
        tree: TreeLayout | None = None,
    ) -> Tensor:
        """Run the spans' tokens, packed in order ([T] int64); logits [R, V] of `rows`, or all.

        With `tree` the tokens of span b are the first nodes of tree b, its root the first of them.
        """
        positions, kept_rows, step = self._layout(spans, rows or [])
        if tree is not None:
            counts = [span.count for span in spans]
            positions = tree.positions(counts, step.context_lens)
            step.ancestor_mask = tree.ancestor_mask
        keep = 0 if rows is None else kept_rows
        return self.paged_model.forward(input_ids, positions, keep, step)

    def prefill(self, token_ids: list[list[int]], spans: list[Span]) -> None:
        """Write keys and values of the spans' tokens, at most chunk_size tokens in one pass."""
        pending = [(ids, span) for ids, span in zip(token_ids, spans, strict=True) if span.count]
        while pending:
            ids_chunk, span_chunk, rest, room = [], [], [], self._chunk_size
            for ids, span in pending:
                count = min(span.count, room)
                room -= count
                if count:
                    ids_chunk += ids[:count]
                    span_chunk.append(span.part(span.start, count))
                if count < span.count:
                    left = span.part(span.start + count, span.count - count)
                    rest.append((ids[count:], left))
            self.forward(torch.tensor(ids_chunk, device=self.device), span_chunk, rows=[])
            pending = rest

    def compact(self, spans: list[Span], path: Tensor, accepted_len: Tensor) -> None:
        """Move the accepted nodes of each span's tree behind its root, in all layers.

        path [B, N] and accepted_len [B] are those of `verify_tree`; nothing waits for the device.
        """
        tables, width = self._block_tables(spans)
        starts = [span.start for span in spans]
        packed = torch.tensor(starts + tables, dtype=torch.int32, device=self.device)
        block_table = packed[len(spans) :].view(-1, width)
        for stack in self._cache_stacks:
            compact_kv(
                stack.keys,
                stack.values,
                block_table,
                packed[: len(spans)],
                path,
                accepted_len,
                backend=self.paged_model.backend,
            )

    def _layout(self, spans: list[Span], rows: list[int]) -> tuple[Tensor, Tensor, PagedStep]:
        """Positions [T], rows [R] and the step, in two copies to the device."""
        size = self._block_size
        positions, slots, context_lens, cu_rows = [], [], [], [0]
        tables, width = self._block_tables(spans)
        for span in spans:
            end = span.start + span.count
            table = span.block_table
            positions += range(span.start, end)
            slots += [table[t // size] * size + t % size for t in range(span.start, end)]
            context_lens.append(end)
            cu_rows.append(cu_rows[-1] + span.count)
        count, batch = len(positions), len(spans)
        wide = torch.tensor(positions + slots + rows, dtype=torch.int64, device=self.device)
        narrow = torch.tensor(
            context_lens + cu_rows + tables, dtype=torch.int32, device=self.device
        )
        step = PagedStep(
            caches=self.caches,
            block_table=narrow[2 * batch + 1 :].view(batch, width),
            context_lens=narrow[:batch],
            cu_rows=narrow[batch : 2 * batch + 1],
            slot_mapping=wide[count : 2 * count],
            backend=self.paged_model.backend,
            spans=spans,
        )
        return wide[:count], wide[2 * count :], step

    def _block_tables(self, spans: list[Span]) -> tuple[list[int], int]:
        """Block tables [B, M], flat, as wide as the longest span needs, and M."""
        width = max(-(-(span.start + span.count) // self._block_size) for span in spans)
        tables: list[int] = []
        for span in spans:
            used = span.block_table[:width]
            tables += used + [-1] * (width - len(used))
        return tables, width
