"""Paged glimpses: a GLIDE draft's passes read the target's pages, without a copy."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fastspec.models.layout import KVCache, PagedStep, Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from fastspec.models.transfer import device_tensor
from fastspec_kernels import cross_attention, tree_attention


@dataclass(frozen=True)
class PagedGlimpse:
    """The target's pages in one packed pass.

    Attributes:
        caches: by draft layer, those of its target layer.
        block_table: [B, M] int32, shared by target and draft.
        context_lens: [B] int32, tokens whose target keys and values are written.
        cu_rows: [B + 1] int32, prefix sums of the rows of this pass.
        is_causal: the rows are the last tokens of each context, and see none after themselves.
        backend: of the kernels.
    """

    caches: list[KVCache]
    block_table: Tensor
    context_lens: Tensor
    cu_rows: Tensor
    is_causal: bool
    backend: str

    def attend(self, layer: int, query: Tensor) -> Tensor:
        key_cache, value_cache = self.caches[layer]
        is_float8 = key_cache.dtype == torch.float8_e4m3fn  # beside which queries are as they are
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

    Drafting rows see every token that the target has cached, which the newest token of a text never
    is. While a prompt is read, a token sees the target's tokens up to itself.
    """

    def __init__(
        self,
        paged_model: PagedModel,
        target_caches: list[KVCache],
        num_blocks: int,
        block_size: int,
        chunk_size: int,
    ):
        super().__init__(paged_model, num_blocks, block_size, chunk_size)
        self._target_caches = target_caches

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        step = super()._step(spans, rows)
        is_reading = all(span.start + span.count <= span.target_len for span in spans)
        context_lens = step.context_lens
        if not is_reading:
            lengths = [span.target_len for span in spans]
            context_lens = device_tensor(lengths, torch.int32, self.device)
        step.glimpse = PagedGlimpse(
            self._target_caches,
            step.block_table,
            context_lens,
            step.cu_rows,
            is_reading,
            step.backend,
        )
        return step
