"""Forward passes of one model over packed, ragged batches of sequences in the paged cache."""

from functools import partial

import torch
from torch import Tensor

from fastspec.config import EngineConfig
from fastspec.config.checks import require
from fastspec.models.graphs import Capture, GraphedForward, capture_for
from fastspec.models.layout import (
    CacheStack,
    KeptInputs,
    KVCache,
    PagedStep,
    Span,
    lay_out,
    tree_positions,
)
from fastspec.models.paged_model import PagedModel
from fastspec.models.transfer import device_tensor
from fastspec_kernels import build_tree, compact_kv

# Spans whose slots a pass fills, and hidden and hidden_cache of `draft_chain`.
ChainStates = tuple[list[Span], Tensor, Tensor]


class ModelRunner:
    """One model with its caches; block tables are passed in, so models can share them.

    Passes may be captured one by one (`GraphedForward`), or all steps of a draft together
    (`fastspec.drafters.graphed_drafts`). A draft that also reads its target has a view of it in
    each pass, `PagedStep.target_view`. Its runner overrides what is about that view: `view_buffers`
    and `view_values` for passes captured one by one, `set_draft_view` and `draft_view_values` for
    captured drafts; `drafting_spans` says which drafts can be captured, and `chain_states` what
    drafts in one call read.

    Args:
        num_blocks: blocks of its caches.
        config: their size, tokens per pass while a prompt is read, and whether passes are captured.
        caches: caches to read and write, of a runner of the model whose layers, or the first of
            them, this one runs; None = its own.
    Raises:
        ValueError: cuda_graphs is "on" but this model cannot be captured, or it attends in chunks
            that are not whole blocks.
    """

    why_not_captured: str | None = None  # what keeps all its passes from it, for errors

    def __init__(
        self,
        paged_model: PagedModel,
        num_blocks: int,
        config: EngineConfig,
        caches: dict[int, KVCache] | None = None,
    ):
        block_size = config.block_size
        if (size := paged_model.chunk_size) and size % block_size:
            raise ValueError(
                f"block_size: {paged_model.name} attends in chunks of {size} tokens, which is not a"
                f" multiple of {block_size}"
            )
        self.paged_model = paged_model
        self.device = paged_model.device
        self.vocab_size = paged_model.vocab_size
        self._cache_stacks: list[CacheStack] = []
        if caches is None:
            self._cache_stacks = paged_model.new_caches(num_blocks, block_size)
            for _, keys, values in self._cache_stacks:
                # Tokens that pad a pass see block 0, and some models scale all tokens by the
                # largest activation of any.
                keys[:, 0], values[:, 0] = 0, 0
            pairs = (stack.by_layer().items() for stack in self._cache_stacks)
            caches = {layer: cache for stack in pairs for layer, cache in stack}
        self.caches = caches
        self.inputs: KeptInputs | None = None
        self._num_blocks, self.block_size = num_blocks, block_size
        self._chunk_size = config.prefill_chunk_size
        self.graphs: GraphedForward | None = None
        if capture := capture_for(config.cuda_graphs, paged_model, self.why_not_captured):
            self.capture_with(capture, must=config.cuda_graphs == "on")

    def capture_with(self, capture: Capture, must: bool) -> None:
        """From now on, replay short passes; see `GraphedForward`."""
        self.graphs = GraphedForward(self.paged_model, self.caches, self.block_size, capture, must)
        self.graphs.inputs = self.inputs

    def view_buffers(self, step: PagedStep) -> tuple[Tensor, ...]:
        """Set `step.target_view` of a pass to be captured; return the buffers that it reads."""
        return ()

    def view_values(self, spans: list[Span], parents: Tensor | None) -> tuple[Tensor, ...] | None:
        """Return what `view_buffers` hold for a pass over these spans; None = run it uncaptured."""
        return ()

    def chain_states(self, spans: list[Span]) -> ChainStates | None:
        """Return what the first pass of `draft_chain` reads and fills, for models that read hidden
        states; None = draft pass by pass."""
        return None

    def drafting_spans(self, spans: list[Span]) -> list[Span] | None:
        """Return the slots that the first pass of a draft fills; None = draft pass by pass."""
        return spans if self.inputs is None else None

    def draft_view_values(self, spans: list[Span], is_known: bool) -> tuple[list[int], list[int]]:
        """Return a number per token and one per sequence for `set_draft_view`, or no numbers.

        is_known: whether the target has read the tokens, which is so in the first pass of a draft.
        """
        return [], []

    def set_draft_view(
        self, step: PagedStep, per_token: Tensor, per_sequence: Tensor, is_known: bool
    ) -> None:
        """Set `step.target_view` of a pass of a draft to be captured.

        per_token [T] int64 and per_sequence [B] int32 are filled before each replay; 0 for padding.
        """

    def whole_caches(self, layers: list[int]) -> list[KVCache]:
        """Return the pages of these layers, with the keys and values of all heads."""
        return [self.caches[layer] for layer in layers]

    def keep_inputs(self, layers: list[int]) -> KVCache:
        """From now on, keep each token's input to these layers, or the last hidden state
        (`LAST_STATE`), in pages with the same slots.

        Tokens that were read before have zeros there.

        Raises:
            ValueError: there are no such layers, or inputs of others are already kept.
        """
        if self.inputs is None:
            self.inputs = self.paged_model.keep_inputs(layers, self._num_blocks, self.block_size)
            keys, values = self.inputs.pages
            self._cache_stacks.append(CacheStack(layers, keys[None], values[None]))
            if self.graphs is not None:
                self.graphs.keep_inputs(self.inputs)
        kept = self.inputs.layers
        require("target layers", layers, layers == kept, f"{kept}, as before")
        return self.inputs.pages

    def forward(
        self,
        input_ids: Tensor | list[int],
        spans: list[Span],
        rows: list[int] | None = None,
        parents: Tensor | None = None,
        reads_text: bool = False,
    ) -> Tensor:
        """Run the spans' packed tokens, a list if the host knows them or a tensor [T] int64; return
        logits [R, V] of `rows`, or of all.

        With `parents` [B, N], see `fastspec_kernels.build_tree`, the tokens of span b are the first
        nodes of tree b, beginning with its root. `reads_text` says that many tokens may come before
        the rows, as always if there are none.
        """
        tree = None
        if parents is not None:
            tree = build_tree(parents, backend=self.paged_model.backend)
        if rows and rows == [*range(len(input_ids))]:
            rows = None
        if self.graphs is not None:
            view_values = partial(self.view_values, spans, parents)
            logits = self.graphs.forward(
                input_ids, spans, rows, tree, view_values, self.view_buffers, reads_text
            )
            if logits is not None:
                return logits
        if isinstance(input_ids, list):
            input_ids = device_tensor(input_ids, torch.int64, self.device)
        step = self._step(spans, rows or [], parents)
        positions = step.positions
        if self.paged_model.chunk_size is not None:
            step.chunks = self._in_chunks(spans, self.paged_model.chunk_size)
        if tree is not None:
            depths, step.ancestor_mask = tree
            counts = [span.count for span in spans]
            positions = tree_positions(depths, counts, step.context_lens)
        kept = None if rows is None else step.rows
        return self.paged_model.forward(input_ids, positions, kept, step)

    def prefill(self, token_ids: list[list[int]], spans: list[Span]) -> None:
        """Write keys and values of the spans' tokens, up to prefill_chunk_size tokens per pass."""
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
            self.forward(ids_chunk, span_chunk, rows=[])
            pending = rest

    def compact(self, spans: list[Span], path: Tensor, accepted_len: Tensor) -> None:
        """Move the accepted nodes of each span's tree to follow its root, in all layers.

        path [B, N] and accepted_len [B] are results of `verify_tree`; this does not synchronise.
        """
        width = max(len(span.block_table) for span in spans)
        values = [span.start for span in spans]
        for span in spans:
            values += span.block_table + [-1] * (width - len(span.block_table))
        packed = device_tensor(values, torch.int32, self.device)
        block_table = packed[len(spans) :].view(len(spans), -1)
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

    def _in_chunks(self, spans: list[Span], size: int) -> dict[int, PagedStep]:
        """Lay out the pass for layers that attend in chunks, with each chunk as a separate text."""
        if all(span.start + span.count <= size for span in spans):
            return {}
        pieces = []
        for span in spans:
            end = span.start + span.count
            for first in range(span.start // size * size, end, size):
                start = max(span.start, first)
                table = span.block_table[first // self.block_size :]
                pieces.append(Span(table, start - first, min(end, first + size) - start))
        return dict.fromkeys(self.paged_model.chunked_layers, self._step(pieces, []))

    def _step(self, spans: list[Span], rows: list[int], parents: Tensor | None = None) -> PagedStep:
        """Lay out a pass over the spans, with two copies to the device.

        `parents` are those of `forward`, for runners whose `step.target_view` depends on them.
        """
        wide, narrow = lay_out(spans, rows, self.block_size)
        step = PagedStep.of(
            self.caches,
            device_tensor(wide, torch.int64, self.device),
            device_tensor(narrow, torch.int32, self.device),
            len(spans),
            (len(wide) - len(rows)) // 2,
            self.paged_model.backend,
            spans,
        )
        step.inputs = self.inputs
        return step


class SplitRunner(ModelRunner):
    """Runs a model together with other processes, with caches for its own heads.

    Heads are split in order, as in transformers' tensor parallelism. Pages with all heads are made
    on request, and filled after each pass by exchange between the processes.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._whole: dict[int, KVCache] = {}

    def whole_caches(self, layers: list[int]) -> list[KVCache]:
        """See `ModelRunner.whole_caches`; all processes must request the same layers.

        Raises:
            ValueError: the heads are neither complete in each process nor split evenly.
            RuntimeError: other processes request something else.
        """
        model = self.paged_model
        assert model.ranks is not None
        model.ranks.check(call="whole_caches", layers=layers)
        config = model.model.config.get_text_config(decoder=True)
        total = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shapes = sorted({tuple(p.shape[2:]) for layer in layers for p in self.caches[layer]})
        own = shapes[0][0]
        if own == total:
            return super().whole_caches(layers)
        if len(shapes) > 1 or own * model.ranks.size != total:
            raise ValueError(
                f"{model.name}: has {total} key-value heads, and each of {model.ranks.size}"
                f" processes caches some of the shapes {shapes}; only equal heads that are split"
                " evenly can be joined"
            )
        if new := [layer for layer in layers if layer not in self._whole]:
            parts = zip(*(self.caches[layer] for layer in new), strict=True)
            joined = (torch.stack([model.ranks.all_gather(p, 2) for p in part]) for part in parts)
            pages = CacheStack(new, *joined)
            self._cache_stacks.append(pages)
            self._whole |= pages.by_layer()
        return [self._whole[layer] for layer in layers]

    def forward(
        self,
        input_ids: Tensor | list[int],
        spans: list[Span],
        rows: list[int] | None = None,
        parents: Tensor | None = None,
        reads_text: bool = False,
    ) -> Tensor:
        logits = super().forward(input_ids, spans, rows, parents, reads_text)
        if self._whole:
            self._gather(spans)
        return logits

    def _gather(self, spans: list[Span]) -> None:
        """Write the tokens of a pass to the pages with all heads."""
        assert self.paged_model.ranks is not None
        wide, _ = lay_out(spans, [], self.block_size)
        slots = device_tensor(wide[len(wide) // 2 :], torch.int64, self.device)
        own = [part.flatten(0, 1)[slots] for layer in self._whole for part in self.caches[layer]]
        joined = self.paged_model.ranks.all_gather(torch.stack(own), 2)  # [2 L, T, G, D]
        whole = [part for cache in self._whole.values() for part in cache]
        for pages, rows in zip(whole, joined, strict=True):
            pages.flatten(0, 1)[slots] = rows


def runner_of(paged_model: PagedModel, *args) -> ModelRunner:
    """Make the runner of a model, with the arguments of `ModelRunner`."""
    return (ModelRunner if paged_model.ranks is None else SplitRunner)(paged_model, *args)
