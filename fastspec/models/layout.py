"""Packed forward passes: their spans, and their layout in two buffers on the device."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastspec.models.transfer import device_tensor
from fastspec_kernels import store_kv

LAST_STATE = -1  # used as a layer index: the head's input, after the final norm
HeadShape = tuple[int, int]  # G, D
KVCache = tuple[Tensor, Tensor]  # key, value: [num_blocks, block_size, G, D]


class AttentionCall(NamedTuple):
    """One call of our attention, as seen by the trial pass; a window of 0 means none."""

    layer: int
    key_heads: HeadShape
    value_heads: HeadShape
    window: int
    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


class CacheStack(NamedTuple):
    """Caches of L layers in one allocation: keys, values [L, num_blocks, block_size, G, D]."""

    layers: list[int]
    keys: Tensor
    values: Tensor

    def by_layer(self) -> dict[int, KVCache]:
        """Return the cache of each layer."""
        pairs = zip(self.keys, self.values, strict=True)
        return dict(zip(self.layers, pairs, strict=True))


class KeptInputs(NamedTuple):
    """Inputs [E] of some layers of a model, or only `LAST_STATE`, for each token, in pages.

    The two halves of E are stored like keys and values, with one head per layer.
    """

    layers: list[int]
    pages: KVCache  # two of [num_blocks, block_size, L, E / 2]


@dataclass(eq=False)
class StateKey:
    """Identifies a text while its tokens are cached; a recurrent model keeps the text's states
    under this key for the same time."""


@dataclass(eq=False)
class EncoderInput:
    """The encoder input of one request, or of several equal ones.

    Each model encodes it once, and keeps the result as long as this object lives.
    """

    token_ids: list[int]


class Span(NamedTuple):
    """Tokens [start, start + count) of one sequence, whose earlier tokens are in the cache.

    A tuple, because the layout of drafts makes one per sequence and step.

    Attributes:
        encoder_input: input of the encoder of an encoder-decoder.
        target_len: leading tokens that the target has cached as well, which a draft may attend to.
        first_read_len: length of the text that was read first, see `RotaryLengths` and
            `RecurrentLayers`.
        state_key: identifies the states that recurrent layers keep for the sequence.
        settled_len: leading tokens of the sequence that stay in its text, whatever is rejected.
    """

    block_table: list[int]
    start: int
    count: int
    encoder_input: EncoderInput | None = None
    target_len: int = 0
    first_read_len: int = 0
    state_key: StateKey | None = None
    settled_len: int = 0

    def part(self, start: int, count: int) -> "Span":
        """Return a span of other tokens of the same sequence."""
        return self._replace(start=start, count=count)

    def slot(self, place: int, block_size: int) -> int:
        """Return the cache slot of the sequence's token at a place."""
        return self.block_table[place // block_size] * block_size + place % block_size


@dataclass
class PagedStep:
    """The metadata that attention needs of one packed forward pass of B sequences, T tokens.

    Attributes:
        caches: by layer index; empty in the trial pass, which gives each layer one block.
        positions: [T] int64, positions of the tokens in their texts.
        rows: [R] int64, the tokens whose logits are kept, if not all are.
        block_table: [B, M] int32.
        context_lens: [B] int32, including the tokens of this pass.
        cu_rows: [B + 1] int32, prefix sums of the tokens of this pass.
        slot_mapping: [T] int64, cache slot of each token.
        first_read_lens: [B] int32, see `RotaryLengths`.
        backend: backend of the kernels.
        spans: the spans that are read, on the host; empty when a graph is replayed.
        ancestor_mask: mask of token trees, see `build_tree`; None = the tokens form chains.
        inputs: pages for the inputs of some layers.
        given: these inputs, [T, E] by layer, for `store_inputs`.
        chunks: the pass as seen by each layer that attends in chunks, by layer index.
        target_view: what a draft reads of its target, such as `PagedStates`.
        calls: calls of our attention, recorded only in the trial pass.
    """

    caches: dict[int, KVCache]
    positions: Tensor
    rows: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_rows: Tensor
    slot_mapping: Tensor
    first_read_lens: Tensor
    backend: str
    spans: list[Span] = field(default_factory=list)
    ancestor_mask: Tensor | None = None
    inputs: "KeptInputs | None" = None
    given: dict[int, Tensor] = field(default_factory=dict)
    chunks: "dict[int, PagedStep]" = field(default_factory=dict)
    target_view: Any = None
    calls: list[AttentionCall] | None = None

    @classmethod
    def of(
        cls,
        caches: dict[int, KVCache],
        wide: Tensor,
        narrow: Tensor,
        batch: int,
        num_tokens: int,
        backend: str,
        spans: list[Span],
    ) -> "PagedStep":
        """Make a pass whose parts are views of the two buffers of `lay_out`."""
        lens, ends, prompts, tables = narrow.tensor_split((batch, 2 * batch + 1, 3 * batch + 1))
        positions, slots, rows = wide.tensor_split((num_tokens, 2 * num_tokens))
        tables = tables.view(batch, -1)
        return cls(
            caches, positions, rows, tables, lens, ends, slots, prompts, backend, spans=spans
        )

    def row_by_row(self) -> "PagedStep":
        """Return the pass with each row as the last token of a text of its own."""
        count = len(self.slot_mapping)
        owners = torch.repeat_interleave(self.cu_rows.diff(), output_size=count)
        rows = torch.arange(count + 1, dtype=torch.int32, device=owners.device)
        tables, lengths = self.block_table[owners], self.context_lens[owners]
        return replace(self, block_table=tables, context_lens=lengths, cu_rows=rows)

    def store_inputs(self) -> None:
        """Store the layers' inputs of this pass, if they are to be kept."""
        if self.inputs is None:
            return
        pages = self.inputs.pages
        states = torch.stack([self.given[layer] for layer in self.inputs.layers], dim=1)
        self.given.clear()
        first, second = states.to(pages[0].dtype).chunk(2, dim=-1)
        store_kv(first, second, *pages, self.slot_mapping, backend=self.backend)

    def probed_cache(self, layer: int, key: Tensor, value: Tensor, *options) -> KVCache:
        """Record a call in the trial pass; return a block for keys and values [T, G, D]."""
        if self.calls is None:
            raise ValueError(f"layer {layer}: attends, but did not when the model was probed")
        heads = (key.shape[1], key.shape[2]), (value.shape[1], value.shape[2])
        self.calls.append(AttentionCall(layer, *heads, *options))
        return key.new_empty((1, *key.shape)), value.new_empty((1, *value.shape))


class PassShape(NamedTuple):
    """Sizes of a forward pass."""

    batch: int  # B sequences
    num_tokens: int  # T, packed
    num_rows: int  # R, whose logits are kept; 0 = all
    width: int  # M blocks per row of the block table

    @classmethod
    def of(cls, spans: list[Span], rows: list[int], block_size: int) -> "PassShape":
        """Return the sizes of a pass over the spans' tokens."""
        width = max(-(-(span.start + span.count) // block_size) for span in spans)
        return cls(len(spans), sum(span.count for span in spans), len(rows), width)

    def most_added(self, block_size: int, num_nodes: int) -> int:
        """Return the most tokens of an added sequence; num_nodes is 0 for chains."""
        return min(num_nodes or self.num_tokens, self.width * block_size)

    @property
    def wide_size(self) -> int:
        """Entries of the int64 buffer, see `lay_out`."""
        return 2 * self.num_tokens + self.num_rows

    @property
    def narrow_size(self) -> int:
        """Entries of the int32 buffer, see `lay_out`."""
        return 3 * self.batch + 1 + self.batch * self.width


def lay_out(
    spans: list[Span],
    rows: list[int],
    block_size: int,
    padded: PassShape | None = None,
    num_nodes: int = 0,
) -> tuple[list[int], list[int]]:
    """Return the buffer values of a pass over the spans' tokens, one span after another.

    With `padded` the pass is padded to these sizes: added tokens belong to added sequences, see
    `PassShape.most_added`. They write nothing and see only block 0, so kernels can treat them like
    any other sequence, and no row of the actual pass depends on them.

    Returns:
        int64: positions [T], cache slots [T] (-1 = not written), rows [R] whose logits are kept;
        int32: context lengths [B], prefix sums of the tokens [B + 1], prompt lengths [B] (see
        `RotaryLengths`), block tables [B, M].
    """
    positions: list[int] = []
    slots: list[int] = []
    for span in spans:
        table, tokens = span.block_table, range(span.start, span.start + span.count)
        positions += tokens
        slots += [table[t // block_size] * block_size + t % block_size for t in tokens]
    counts = [span.count for span in spans]
    context_lens = [span.start + span.count for span in spans]
    first_read_lens = [span.first_read_len for span in spans]
    width = -(-max(context_lens) // block_size)
    if padded is not None:
        width, missing = padded.width, padded.num_tokens - len(positions)
        added, left, most = [], missing, padded.most_added(block_size, num_nodes)
        for _ in range(padded.batch - len(spans)):
            added.append(min(left, most))
            left -= added[-1]
        if left:
            raise ValueError(f"padded: {left} of {missing} added tokens fit in no sequence")
        positions += [0] * missing
        slots += [-1] * missing
        rows = rows + [0] * (padded.num_rows - len(rows))
        counts += added
        context_lens += added
        first_read_lens += [0] * len(added)
    narrow = [*context_lens, *accumulate(counts, initial=0), *first_read_lens]
    for span in spans:
        table = span.block_table[:width]
        narrow += table + [-1] * (width - len(table))
    narrow += [0] * (width * (len(counts) - len(spans)))
    return positions + slots + rows, narrow


def tree_positions(depths: Tensor, counts: list[int], context_lens: Tensor) -> Tensor:
    """Return positions [T] int64 of the first counts[b] nodes of each tree, which end its context.

    A node's position is its root's plus its depth; padding counts as the root.

    Args:
        depths: [B, N] int32, see `fastspec_kernels.build_tree`.
        context_lens: [B] int32.
    """
    in_batch = device_tensor(counts, torch.int64, context_lens.device)
    roots = context_lens.long() - in_batch
    return packed(roots[:, None] + depths.clamp(min=0), counts)


def packed(values: Tensor, counts: list[int]) -> Tensor:
    """Concatenate the first counts[b] entries of each row of [B, N] to [T]."""
    width = values.shape[1]
    if all(count == width for count in counts):
        return values.reshape(-1)
    places = [row * width + column for row, count in enumerate(counts) for column in range(count)]
    return values.reshape(-1)[device_tensor(places, torch.int64, values.device)]
