"""Drafting with models that read hidden states of the target, or their own until it has any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastspec.config import EngineConfig
from fastspec.drafters.target_reader import TargetReader
from fastspec.models.layout import LAST_STATE, KVCache, PagedStep, Span, packed
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ChainStates, ModelRunner
from fastspec.models.transfer import device_tensor, padded_tensor


@dataclass(frozen=True)
class PagedStates:
    """The hidden states that the T rows of one pass read and write.

    Attributes:
        inputs: [slots, L, E / 2], the halves of the target's hidden states, L for each token.
        own: [slots, E], hidden states of the draft.
        is_known: for each row, whether the target has read the token before the row's; a bool
            tensor [T] in captured passes and for token trees.
        slots: [T] int64, the slot of that token's state, in `inputs` if known, else in `own`.
        row_slots: [T] int64, the slots of the rows.
    """

    inputs: Sequence[Tensor]
    own: Tensor
    is_known: list[bool] | Tensor
    slots: Tensor
    row_slots: Tensor

    def read(self, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [1, T, E], for each row the fused target states or the draft's own state."""
        is_known = self.is_known
        if isinstance(is_known, list):
            if not any(is_known):
                return self.own.index_select(0, self.slots)[None]
            differs = not all(is_known)
            is_known = device_tensor(is_known, torch.bool, self.own.device) if differs else None
        slots = self.slots
        if is_known is not None:
            slots = slots.clamp(max=len(self.inputs[0]) - 1)  # `own` has a few more
        states = torch.cat([half.index_select(0, slots) for half in self.inputs], dim=-1)
        fused = fuse(states.flatten(1).to(self.own.dtype))
        if is_known is not None:
            fused = torch.where(is_known[:, None], fused, self.own[self.slots])
        return fused[None]

    def keep(self, hidden: Tensor) -> None:
        """Store the states of the rows, [1, T, E], for later rows."""
        self.own[self.row_slots] = hidden[0]


class StateReader(PreTrainedModel, GenerationMixin):
    """A draft model that reads its target's hidden states, by default the last one.

    Row i reads the embedding of token i and a hidden state of token i - 1 (the target's if known,
    else its own), and predicts token i + 1.
    """

    base_model_prefix = "model"
    _supports_attention_backend = True

    embed_tokens: Any
    norm: nn.Module  # before the head
    lm_head: Any

    @property
    def target_layers(self) -> list[int]:
        """Layers of the target whose inputs it reads, or `LAST_STATE`."""
        return [LAST_STATE]

    @property
    def state_size(self) -> int:
        """Size of the hidden states that rows read."""
        return self.config.hidden_size

    @property
    def numbers_beside(self) -> int:
        """Numbers per token in pages other than keys and values: hidden states of both models."""
        return 2 * self.state_size

    def fuse(self, states: Tensor) -> Tensor:
        """Combine the target's concatenated states to the input [..., E] of a row."""
        return states

    def advance(
        self, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, paged_step: PagedStep
    ) -> Tensor:
        """Return the draft's hidden states [1, T, E] from what each row reads, [1, T, E] each."""
        raise NotImplementedError

    def handed_on(self, hidden: Tensor) -> Tensor:
        """Return the states [1, T, E] that later rows read, from those of `advance`."""
        return hidden

    def forward(
        self,
        input_ids: Tensor,  # [1, T]
        position_ids: Tensor,
        logits_to_keep: int | Tensor = 0,
        paged_step: Any = None,
        **unused,  # the cache, through which keys and values only pass
    ) -> CausalLMOutputWithPast:
        embeddings = self.embed_tokens(input_ids)
        states: PagedStates | None = paged_step.target_view
        # The pass that probes the model has no states.
        hidden = torch.zeros_like(embeddings) if states is None else states.read(self.fuse)
        hidden = self.advance(embeddings, hidden, position_ids, paged_step)
        if states is not None:
            states.keep(self.handed_on(hidden))
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(hidden[:, rows])))


class StateRunner(ModelRunner):
    """Runs a `StateReader`, which reads token i with its target's hidden state of token i - 1.

    The first token has no row, so token i has the draft's row i - 1, in the slot of token i - 1.
    The contents of a block therefore depend on one token after it.
    """

    def __init__(
        self,
        paged_model: PagedModel,
        inputs: KVCache,
        num_blocks: int,
        config: EngineConfig,
    ):
        self._inputs_read = [half.view(-1, *half.shape[2:]) for half in inputs]  # by slot
        super().__init__(paged_model, num_blocks, config)
        size = paged_model.model.state_size
        self._unwritten = num_blocks * self.block_size  # always zero
        shape = self._unwritten + 2, size  # the last for rows without a slot, -1
        self._own = torch.zeros(shape, dtype=paged_model.dtype, device=self.device)

    def forward(
        self,
        input_ids: Tensor | list[int],
        spans: list[Span],
        rows: list[int] | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """See `ModelRunner.forward`; `rows` has no row for the first token of a text."""
        if any(span.start == 0 for span in spans):
            places = accumulate((span.count for span in spans), initial=0)
            firsts = {place for place, span in zip(places, spans, strict=False) if span.start == 0}
            kept = [row for row in range(len(input_ids)) if row not in firsts]
            if isinstance(input_ids, list):
                input_ids = [input_ids[row] for row in kept]
            else:
                input_ids = input_ids[device_tensor(kept, torch.int64, self.device)]
            rows = rows and [kept.index(row) for row in rows]
            spans = [span if span.start else span.part(1, span.count - 1) for span in spans]
            spans = [span for span in spans if span.count]
            if not spans:
                return torch.empty((0, self.paged_model.num_columns), device=self.device)
        return super().forward(input_ids, shifted(spans), rows, parents)

    def view_buffers(self, step: PagedStep) -> tuple[Tensor, ...]:
        """See `ModelRunner.view_buffers`: each row's slot to read, and whose state that is."""
        slots = torch.zeros_like(step.slot_mapping)
        is_known = torch.zeros_like(slots, dtype=torch.bool)
        self._let_read(step, slots, is_known)
        return slots, is_known

    def view_values(self, spans: list[Span], parents: Tensor | None) -> tuple[Tensor, ...] | None:
        slots, is_known = self._reads(spans, parents)
        if isinstance(is_known, list):
            is_known = device_tensor(is_known, torch.bool, self.device)
        return slots, is_known

    def chain_states(self, spans: list[Span]) -> ChainStates | None:
        """See `ModelRunner.chain_states`; the first token of a text has no row."""
        filled = shifted(spans)
        if any(span.start < 0 for span in filled):
            return None
        slots, is_known = self._reads(filled, None)
        states = PagedStates(self._inputs_read, self._own, is_known, slots, slots)
        read = states.read(self.paged_model.model.fuse)
        return filled, read[0].contiguous(), self._own

    def drafting_spans(self, spans: list[Span]) -> list[Span] | None:
        """See `ModelRunner.drafting_spans`; the target must know what comes before each token."""
        filled = shifted(spans)
        fits = all(x.start >= 0 and x.start + x.count <= x.target_len for x in filled)
        return filled if fits else None

    def draft_view_values(self, spans: list[Span], is_known: bool) -> tuple[list[int], list[int]]:
        """See `ModelRunner.draft_view_values`: the slots of the states that rows read."""
        return self._slots_read(spans, [is_known] * sum(span.count for span in spans)), []

    def set_draft_view(
        self, step: PagedStep, per_token: Tensor, per_sequence: Tensor, is_known: bool
    ) -> None:
        self._let_read(step, per_token, [is_known] * len(per_token))

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step = super()._step(spans, rows)
        self._let_read(step, *self._reads(spans, parents))
        return step

    def _let_read(self, step: PagedStep, slots: Tensor, is_known: list[bool] | Tensor) -> None:
        """Let the rows of a pass read the states in these slots, see `PagedStates`."""
        states = self._inputs_read, self._own, is_known, slots, step.slot_mapping
        step.target_view = PagedStates(*states)

    def _reads(
        self, spans: list[Span], parents: Tensor | None
    ) -> tuple[Tensor, list[bool] | Tensor]:
        """Return the slots [T] int64 of the states that rows read, and whether each is known."""
        is_known = are_known(spans)
        slots = device_tensor(self._slots_read(spans, is_known), torch.int64, self.device)
        if parents is None:
            return slots, is_known
        known = device_tensor(is_known, torch.bool, self.device)
        return torch.where(known, slots, self._slots_of_parents(spans, parents)), known

    def _slots_read(self, spans: list[Span], is_known: list[bool]) -> list[int]:
        """Return each row's own slot for the target's state, the one before it for the draft's,
        or zeros for a state that the same pass computes."""

        def slot_read(span: Span, place: int, known: bool) -> int:
            if not known and place > span.start:
                return self._unwritten
            return span.slot(place if known else place - 1, self.block_size)

        rows = [(span, place) for span in spans for place in positions_of(span)]
        return [slot_read(*row, known) for row, known in zip(rows, is_known, strict=True)]

    def _slots_of_parents(self, spans: list[Span], parents: Tensor) -> Tensor:
        """Return the slots [T] int64 of each row's parent's state, for rows of token trees."""
        counts = [span.count for span in spans]
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        starts = [span.start for span in spans]
        owner, start = (device_tensor(x, torch.int64, self.device) for x in (owners, starts))
        place = start[owner] + packed(parents, counts).clamp(min=0)
        tables = [span.block_table for span in spans]
        table = padded_tensor(tables, max(map(len, tables)), self.device)
        blocks = table[owner, place // self.block_size].long()
        return blocks * self.block_size + place % self.block_size


def shifted(spans: list[Span]) -> list[Span]:
    """Return the slots of the spans' rows, each one before its token's."""
    return [span.part(span.start - 1, span.count) for span in spans]


def are_known(spans: list[Span]) -> list[bool]:
    """Return, for each row, whether the target has read the token before the row's."""
    return [place < span.target_len for span in spans for place in positions_of(span)]


def positions_of(span: Span) -> range:
    """Return the positions of a span's tokens."""
    return range(span.start, span.start + span.count)


class StateDrafter(TargetReader):
    """Drafts with a `StateReader`; from now on the target's runner keeps hidden states.

    Committed draft tokens are reread with the target's hidden states instead of its own.
    """

    keeps_drafts = False  # which it read with its own states
    runner_class = StateRunner

    def room(self, length: int) -> int:
        """See `DraftModelDrafter.room`; 0 after a single token, which has no hidden state yet."""
        return super().room(length) if length > 1 else 0
