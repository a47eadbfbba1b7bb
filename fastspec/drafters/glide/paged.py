"""Paged glimpses: a GLIDE draft's passes read the target's pages without copying them."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fastspec.config import EngineConfig
from fastspec.models.layout import KVCache, PagedStep, Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import cross_attention, tree_attention


@dataclass(frozen=True)
class PagedGlimpse:
    """The target's pages in one packed pass.

    Attributes:
        caches: for each draft layer, the caches of its target layer.
        block_table: [B, M] int32, shared by target and draft.
        context_lens: [B] int32, tokens whose target keys and values are written.
        cu_rows: [B + 1] int32, prefix sums of the rows of this pass.
        is_causal: whether the rows are the last tokens of each context and see no later ones.
        backend: backend of the kernels.
    """

    caches: list[KVCache]
    block_table: Tensor
    context_lens: Tensor
    cu_rows: Tensor
    is_causal: bool
    backend: str

    def attend(self, layer: int, query: Tensor) -> Tensor:
        key_cache, value_cache = self.caches[layer]
        is_float8 = key_cache.dtype == torch.float8_e4m3fn  # queries keep their dtype
        attention = tree_attention if self.is_causal else cross_attention
        out = attention(
            query[0].transpose(0, 1).to(query.dtype if is_float8 else key_cache.dtype),
            key_cache,
            value_cache,
            self.block_table,
            self.context_lens,
            self.cu_rows,
            backend=self.backend,
        )
        return cast(Tensor, out)[None].to(query.dtype)


class GlideRunner(ModelRunner):
    """Runs a GLIDE draft over its own pages and, in cross-attention, the target's.

    Drafting rows see every token that the target has cached, which never includes a text's newest
    token. While a prompt is read, a token sees the target's tokens up to itself.
    """

    def __init__(
        self,
        paged_model: PagedModel,
        target_caches: list[KVCache],
        num_blocks: int,
        config: EngineConfig,
    ):
        self._target_caches = target_caches
        super().__init__(paged_model, num_blocks, config)

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step = super()._step(spans, rows)
        lengths, is_reading = step.context_lens, is_reading_prompt(spans)
        if not is_reading:
            target_lens = [span.target_len for span in spans]
            lengths = device_tensor(target_lens, torch.int32, self.device)
        pages = step.block_table, lengths, step.cu_rows
        step.target_view = PagedGlimpse(self._target_caches, *pages, is_reading, step.backend)
        return step

    def view_buffers(self, step: PagedStep) -> tuple[Tensor, ...]:
        """See `ModelRunner.view_buffers`: how many tokens of the target each sequence sees."""
        target_lens = torch.zeros_like(step.context_lens)
        self.set_draft_view(step, target_lens, target_lens, is_known=False)
        return (target_lens,)

    def view_values(self, spans: list[Span], parents: Tensor | None) -> tuple[Tensor, ...] | None:
        if is_reading_prompt(spans):
            return None
        target_lens = [span.target_len for span in spans]
        return (device_tensor(target_lens, torch.int32, self.device),)

    def drafting_spans(self, spans: list[Span]) -> list[Span] | None:
        """See `ModelRunner.drafting_spans`."""
        return None if is_reading_prompt(spans) else spans

    def draft_view_values(self, spans: list[Span], is_known: bool) -> tuple[list[int], list[int]]:
        """See `ModelRunner.draft_view_values`: how many tokens of the target a sequence sees."""
        return [], [span.target_len for span in spans]

    def set_draft_view(
        self, step: PagedStep, per_token: Tensor, per_sequence: Tensor, is_known: bool
    ) -> None:
        pages = step.block_table, per_sequence, step.cu_rows
        step.target_view = PagedGlimpse(self._target_caches, *pages, False, step.backend)


def is_reading_prompt(spans: list[Span]) -> bool:
    """Whether the target has read all of the tokens, so that the pass drafts nothing."""
    return all(span.start + span.count <= span.target_len for span in spans)
