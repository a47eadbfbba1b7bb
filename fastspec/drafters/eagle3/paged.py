"""Passes of an EAGLE draft over pages: its own cache, its own hidden states, its target's."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fastspec.drafters.eagle3.model import FlatEagle3
from fastspec.models.flat import has_layer_kernels
from fastspec.models.layout import KVCache, PagedStep, Span, packed
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor


@dataclass(frozen=True)
class PagedStates:
    """The hidden states that the T rows of one pass read and leave.

    Attributes:
        inputs: pages of the target's hidden states.
        own: [slots, E], what the draft has made.
        is_known: of each row, whether the target has read the token before its own.
        slots: [T] int64, where that is kept in `inputs`, else in `own`.
        row_slots: [T] int64, of the rows.
    """

    inputs: list[KVCache]
    own: Tensor
    is_known: list[bool]
    slots: Tensor
    row_slots: Tensor

    def read(self, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        if not any(self.is_known):
            return self.own[self.slots][None]
        halves = [part.flatten(0, 1)[self.slots, 0] for cache in self.inputs for part in cache]
        fused = fuse(torch.cat(halves, dim=-1).to(self.own.dtype))
        if not all(self.is_known):
            is_known = device_tensor(self.is_known, torch.bool, fused.device)
            fused = torch.where(is_known[:, None], fused, self.own[self.slots])
        return fused[None]

    def keep(self, hidden: Tensor) -> None:
        self.own[self.row_slots] = hidden[0]


class Eagle3Runner(ModelRunner):
    """Runs an EAGLE draft, which reads token i with what its target made of token i - 1.

    The row of token i is the draft's row i - 1, as the first token has none: it lies in the slot of
    the token before. So what a block holds depends on one token after it.
    """

    def __init__(
        self,
        paged_model: PagedModel,
        inputs: list[KVCache],
        num_blocks: int,
        block_size: int,
        chunk_size: int,
    ):
        super().__init__(paged_model, num_blocks, block_size, chunk_size)
        self._inputs_read = inputs
        size = paged_model.model.config.hidden_size
        shape = num_blocks * block_size, size
        self._own = torch.zeros(shape, dtype=paged_model.dtype, device=self.device)
        same_type = self.caches[0][0].dtype == paged_model.dtype  # the op takes no 8-bit caches
        if same_type and has_layer_kernels(self.device, paged_model.backend):
            weights = paged_model.model.midlayer.weights()
            if weights is not None:
                paged_model.run_flat(FlatEagle3(paged_model.model, weights))

    def forward(
        self,
        input_ids: Tensor,
        spans: list[Span],
        rows: list[int] | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """As `ModelRunner.forward`; `rows` has none of the first token of a text."""
        if any(span.start == 0 for span in spans):
            places = accumulate((span.count for span in spans), initial=0)
            firsts = {place for place, span in zip(places, spans, strict=False) if span.start == 0}
            kept = [row for row in range(len(input_ids)) if row not in firsts]
            input_ids = input_ids[device_tensor(kept, torch.int64, self.device)]
            rows = rows and [kept.index(row) for row in rows]
            spans = [span if span.start else span.part(1, span.count - 1) for span in spans]
            spans = [span for span in spans if span.count]
            if not spans:
                return torch.empty((0, self.paged_model.num_columns), device=self.device)
        shifted = [span.part(span.start - 1, span.count) for span in spans]
        return super().forward(input_ids, shifted, rows, parents)

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step, size = super()._step(spans, rows), self._block_size
        # Where each row's hidden state lies: the target's in the row's own slot, the draft's in the
        # one before.
        slots, is_known = [], []
        for span in spans:
            for place in range(span.start, span.start + span.count):
                is_known.append(place < span.target_len)
                source = place if is_known[-1] else place - 1
                slots.append(span.block_table[source // size] * size + source % size)
        read = device_tensor(slots, torch.int64, self.device)
        if parents is not None:
            read = torch.where(
                device_tensor(is_known, torch.bool, self.device),
                read,
                self._slots_of_parents(step, spans, parents),
            )
        step.glimpse = PagedStates(self._inputs_read, self._own, is_known, read, step.slot_mapping)
        return step

    def _slots_of_parents(self, step: PagedStep, spans: list[Span], parents: Tensor) -> Tensor:
        """Slots [T] int64 of the states of each row's parent, for rows of token trees."""
        counts = [span.count for span in spans]
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        starts = [span.start for span in spans]
        owner, start = (device_tensor(x, torch.int64, self.device) for x in (owners, starts))
        place = start[owner] + packed(parents, counts).clamp(min=0)
        blocks = step.block_table[owner, place // self._block_size].long()
        return blocks * self._block_size + place % self._block_size
