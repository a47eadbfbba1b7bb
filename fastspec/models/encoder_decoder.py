"""T5-type encoder-decoders on the paged cache: their encoders' keys and values, and attention with
a relative bias over the pages."""

from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from fastspec.models.blocks import blocks_needed
from fastspec.models.layout import EncoderInput, KVCache, PagedStep
from fastspec.models.paged_model import PagedModel, PassThroughCache, cache_name, no_mask
from fastspec.models.transfer import device_tensor
from fastspec.models.twin import twin_of
from fastspec_kernels import cross_attention, store_kv

T5_ATTENTION_NAME = "fastspec_t5"
_BLOCK_SIZE = 16
_SUPPORTED = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
)


class EncoderDecoderModel(PagedModel):
    """A T5-type model, whose decoder runs over pages and whose encoder runs once per input.

    An input is encoded on its own and in one pass when its request first runs, so the result does
    not depend on the batch. The keys and values of cross-attention stay until the request is
    forgotten, even while it waits without blocks.

    Raises:
        ValueError: the encoder-decoder has another type or no decoder start token.
    """

    def _adopt(self, model: PreTrainedModel) -> None:
        if self.name not in _SUPPORTED:
            raise ValueError(
                f"{self.name}: T5, mT5 and umT5 are the only supported encoder-decoders"
            )
        if self.ranks is not None:
            raise ValueError(
                f"{self.name}: an encoder-decoder split over processes is not supported"
            )
        start_ids = (
            getattr(holder, "decoder_start_token_id", None)
            for holder in (model.generation_config, model.config)
        )
        self.decoder_start_id = next((i for i in start_ids if i is not None), None)
        if not isinstance(self.decoder_start_id, int):
            raise ValueError(
                f"{self.name}: decoder_start_token_id of its config: expected an int, got"
                f" {self.decoder_start_id!r}"
            )
        self.model = twin_of(model, T5_ATTENTION_NAME).eval()
        encoder = cast(Any, model).encoder
        self.model.encoder = twin_of(encoder, encoder.config._attn_implementation).eval()
        for block in self.model.decoder.block:
            block.layer[0].SelfAttention.is_causal = True  # umT5's is not before transformers 5.18
        layers = [block.layer[1].EncDecAttention for block in self.model.decoder.block]
        self._num_layers = len(layers)
        self._cache_name = cache_name(model)
        self._encoder_cache = EncoderCache(layers, self.backend)
        # The model neither projects nor stores these: our attention reads the real ones.
        self._cache = EncoderDecoderCache(PassThroughCache(), _ReadyCache(layers))
        size = (1, 1, model.config.d_model)
        self._encoder_outputs = (torch.empty(size, dtype=self.dtype, device=self.device),)

    def forward(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor | None, step: PagedStep
    ) -> Tensor:
        inputs = []
        for span in step.spans:
            if span.encoder_input is None:
                raise ValueError(f"{self.name}: needs an encoder_input for every span")
            if span.encoder_input not in self._encoder_cache:
                self._encode(span.encoder_input)
            inputs.append(span.encoder_input)
        encoded = self._encoder_cache.inputs(inputs)
        logits = self.model(
            decoder_input_ids=input_ids[None],
            encoder_outputs=self._encoder_outputs,
            use_cache=False,
            t5_step=_t5_step(step, positions, *encoded),
            **{self._cache_name: self._cache},
        ).logits[0]
        return logits if rows is None else logits[rows]

    def _encode(self, encoder_input: EncoderInput) -> None:
        last = self.vocab_size - 1  # tokens a draft model cannot read only cost accuracy
        ids = [min(token_id, last) for token_id in encoder_input.token_ids]
        output = self.model.encoder(input_ids=device_tensor([ids], torch.int64, self.device))
        self._encoder_cache.add(encoder_input, output.last_hidden_state[0])


class EncoderCache:
    """Pages with the keys and values of encoded inputs; freed when an input object is gone."""

    def __init__(self, layers: list[Any], backend: str):
        self._layers = layers  # cross-attentions
        self._backend = backend
        self._blocks: WeakKeyDictionary[EncoderInput, list[int]] = WeakKeyDictionary()
        self._free: list[int] = []
        self._num_blocks = 0
        self._caches: list[KVCache] = [self._empty(layer, 0) for layer in layers]

    def __contains__(self, encoder_input: EncoderInput) -> bool:
        return encoder_input in self._blocks

    def add(self, encoder_input: EncoderInput, states: Tensor) -> None:
        """Store keys and values of an input's encoder states [S, d_model]."""
        length = states.shape[0]
        blocks = self._take(blocks_needed(length, _BLOCK_SIZE))
        slots = [blocks[t // _BLOCK_SIZE] * _BLOCK_SIZE + t % _BLOCK_SIZE for t in range(length)]
        try:
            slot_mapping = device_tensor(slots, torch.int64, states.device)
            for layer, caches in zip(self._layers, self._caches, strict=True):
                shape = (length, layer.n_heads, layer.key_value_proj_dim)
                key, value = layer.k(states).view(shape), layer.v(states).view(shape)
                store_kv(key, value, *caches, slot_mapping, backend=self._backend)
        except BaseException:  # such as a lack of memory; nobody else would give them back
            self._free += blocks
            raise
        self._blocks[encoder_input] = blocks
        finalize(encoder_input, self._free.extend, blocks)

    def inputs(self, inputs: list[EncoderInput]) -> tuple[list[KVCache], Tensor, Tensor]:
        """Return caches by layer, block tables [B, M] and lengths [B] for a batch of inputs."""
        tables = [self._blocks[encoder_input] for encoder_input in inputs]
        width = max(map(len, tables))
        values = [len(encoder_input.token_ids) for encoder_input in inputs]
        for table in tables:
            values += table + [-1] * (width - len(table))
        batch, device = len(inputs), self._caches[0][0].device
        packed = device_tensor(values, torch.int32, device)
        return self._caches, packed[batch:].view(batch, width), packed[:batch]

    def _take(self, count: int) -> list[int]:
        """Take free blocks; the caches grow by doubling, so that contents are rarely copied.

        If there is no memory for all layers, nothing has changed.
        """
        missing = count - len(self._free)
        if missing > 0:
            added = max(missing, self._num_blocks)
            grown: list[KVCache] = []
            for layer, caches in zip(self._layers, self._caches, strict=True):
                fresh = self._empty(layer, added)
                key, value = map(torch.cat, zip(caches, fresh, strict=True))
                grown.append((key, value))
            self._caches = grown
            self._free += range(self._num_blocks + added - 1, self._num_blocks - 1, -1)
            self._num_blocks += added
        return [self._free.pop() for _ in range(count)]

    def _empty(self, layer: Any, num_blocks: int) -> KVCache:
        shape = (num_blocks, _BLOCK_SIZE, layer.n_heads, layer.key_value_proj_dim)
        weight = layer.k.weight
        return weight.new_empty(shape), weight.new_empty(shape)


class _ReadyCache(PassThroughCache):
    """Reports the keys and values of all cross-attentions as present."""

    def __init__(self, layers: list[Any]):
        super().__init__()
        for layer in layers:
            nothing = layer.k.weight.new_empty((1, layer.n_heads, 1, layer.key_value_proj_dim))
            self.layers.append(cast(Any, SimpleNamespace(keys=nothing, values=nothing)))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1


@dataclass
class T5Step:
    """One packed forward pass of a T5-type decoder; B sequences with at most Q of the T tokens.

    Attributes:
        paged: the pass over the decoder's own pages.
        encoded: by layer, keys and values of the encoded inputs.
        encoded_table: [B, M] int32, their blocks.
        encoded_lens: [B] int32, their lengths.
        rows: [B, Q] int64, place of each token in the packed batch; short rows are padded with
            arbitrary places.
        places: [T] int64, place of each token in the flattened `rows`.
        positions: [B, Q] int64.
        bias: [B, H, Q, S], added to the scores of the S slots; -inf where a token must not look.
            Layers without a bias of their own use that of the previous layer.
    """

    paged: PagedStep
    encoded: list[KVCache]
    encoded_table: Tensor
    encoded_lens: Tensor
    rows: Tensor
    places: Tensor
    positions: Tensor
    bias: Tensor | None = None


def t5_attention(
    module: Any,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    t5_step: T5Step | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Self-attend to the pages or cross-attend to the encoder's; return [1, T, H, D]."""
    if t5_step is None:
        name = type(module).__name__
        raise ValueError(
            f"{name}: attention {T5_ATTENTION_NAME!r} only runs inside a fastspec engine"
        )
    attend = _self_attention if module.is_causal else _cross_attention
    return attend(module, query, key, value, scaling, t5_step)[None], None


AttentionInterface.register(T5_ATTENTION_NAME, t5_attention)
AttentionMaskInterface.register(T5_ATTENTION_NAME, no_mask)


def _cross_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, step: T5Step
) -> Tensor:
    key_cache, value_cache = step.encoded[module.layer_idx]
    return cross_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        step.encoded_table,
        step.encoded_lens,
        step.paged.cu_rows,
        scale=scale,
        backend=step.paged.backend,
    )


def _self_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, step: T5Step
) -> Tensor:
    """Gather pages and tokens into padded batches, because tree_attention supports no bias."""
    paged = step.paged
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, G, D]
    layer = module.layer_idx
    caches = paged.caches.get(layer) or paged.probed_cache(layer, key, value, 0)
    store_kv(key, value, *caches, paged.slot_mapping, backend=paged.backend)
    table = paged.block_table.clamp(min=0)
    slots = torch.arange(table.shape[1] * caches[0].shape[1], device=table.device)
    unused = (slots >= paged.context_lens[:, None])[:, :, None, None]
    # Unused slots may contain non-finite values, which would pass even a weight of zero.
    keys, values = (
        cache[table].flatten(1, 2).masked_fill_(unused, 0).transpose(1, 2) for cache in caches
    )
    if module.has_relative_attention_bias:
        step.bias = _relative_bias(module, *_looks(step, slots))
    padded = query[0][:, step.rows].transpose(0, 1)  # [B, H, Q, D]
    out = scaled_dot_product_attention(padded, keys, values, attn_mask=step.bias, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[step.places]


def _looks(step: T5Step, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return each slot's distance back from each token, and whether it is seen: both [B, Q, S]."""
    if step.paged.ancestor_mask is None:
        distances = step.positions[:, :, None] - slots
        return distances, distances >= 0
    counts = step.paged.cu_rows.diff()[:, None]
    nodes = slots - (step.paged.context_lens[:, None] - counts)  # [B, S], < 0 before the tree
    in_tree = (nodes >= 0) & (nodes < counts)
    places = nodes.clamp(0, step.rows.shape[1] - 1)
    positions = torch.where(in_tree, step.positions.gather(1, places), slots)
    own = (step.rows - step.rows[:, :1])[:, :, None]  # [B, Q, 1]
    masks = step.paged.ancestor_mask.take_along_dim(own, dim=1)  # [B, Q, ceil(N / 64)]
    words = masks.take_along_dim((places // 64)[:, None], dim=2)
    is_ancestor = (words >> (places % 64)[:, None]) & 1 == 1
    distances = step.positions[:, :, None] - positions[:, None]
    return distances, torch.where(in_tree[:, None], is_ancestor, nodes[:, None] < 0)


def _relative_bias(module: Any, distances: Tensor, is_seen: Tensor) -> Tensor:
    """Return the bias [B, H, Q, S] by distance, constant from the maximum distance on."""
    far = module.relative_attention_max_distance
    last = module.compute_bias(1, far + 1, past_seen_tokens=far)[0, :, 0]  # [H, far+1]
    by_distance = last.flip(-1)
    bias = by_distance[:, distances.clamp(0, far)].masked_fill(~is_seen, -torch.inf)
    return bias.transpose(0, 1)


def _t5_step(
    step: PagedStep, positions: Tensor, encoded: list[KVCache], table: Tensor, lens: Tensor
) -> T5Step:
    """Build the layout of a padded batch with one copy to the device."""
    counts = [span.count for span in step.spans]
    batch, width = len(counts), max(counts)
    starts = [0, *accumulate(counts)]
    rows = [starts[b] + min(place, counts[b] - 1) for b in range(batch) for place in range(width)]
    places = [b * width + place for b in range(batch) for place in range(counts[b])]
    packed = device_tensor(rows + places, torch.int64, positions.device)
    row_index = packed[: batch * width].view(batch, width)
    places_index = packed[batch * width :]
    return T5Step(step, encoded, table, lens, row_index, places_index, positions[row_index])
