"""The hook into transformers: attention of a packed [1, T] batch to the paged cache."""

import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from fastspec.config.checks import require
from fastspec.models.flat import (
    TRIAL_TOKENS,
    ChainParts,
    FlatLayer,
    FlatPass,
    find_layers,
    flatten,
)
from fastspec.models.layout import (
    LAST_STATE,
    AttentionCall,
    CacheStack,
    EncoderInput,
    HeadShape,
    KeptInputs,
    PagedStep,
    Span,
    StateKey,
)
from fastspec.models.loading import float_dtypes
from fastspec.models.quantized import quantize_linear_layers
from fastspec.models.recurrent import RecurrentLayers
from fastspec.models.reduced_vocabulary import DraftVocabulary, ReducedHead
from fastspec.models.rotary import RotaryLengths
from fastspec.models.sharded import ranks_of
from fastspec.models.twin import (
    is_plain_linear,
    layers_of,
    most_rows,
    replaced,
    twin_of,
    use_linear_kernels,
    use_mlp_kernels,
)
from fastspec_kernels import available_backends, backend_of, store_kv, tree_attention

# transformers would treat a name with "flash", "sdpa" or a slash as one of its own.
ATTENTION_NAME = "fastspec_paged"
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_STATELESS_TYPES = {"mlp", "moe"}

# For models that pass no keyword arguments to their attention, such as Nemotron and StableLM.
_RUNNING: ContextVar[PagedStep | None] = ContextVar("paged_step", default=None)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_step: PagedStep | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Store this pass's keys and values, then attend to the pages; return [1, T, H, D].

    Values narrower than keys, as in expanded latent attention (MLA), are zero-padded to the width
    of keys.
    """
    name, step = type(module).__name__, paged_step or _RUNNING.get()
    if step is None:
        raise ValueError(f"{name}: called outside the engine's passes")
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError(f"{name}: builds its own attention mask or bias, which is not supported")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"{name}: bidirectional attention, as in an encoder, is not supported")
    layer, window = cast(int, module.layer_idx), sliding_window or 0
    key_size, value_size = key.shape[-1], value.shape[-1]
    if value_size > key_size:
        raise ValueError(
            f"{name}: values wider than keys ({value_size} and {key_size} elements) are not"
            " supported"
        )
    if value_size < key_size:
        value = pad(value, (0, key_size - value_size))
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, G, D]
    options, step = (window, scaling, softcap or 0.0, s_aux), step.chunks.get(layer, step)
    cache = step.caches.get(layer) or step.probed_cache(layer, key, value, *options)
    store_kv(key, value, *cache, step.slot_mapping, backend=step.backend)
    out = tree_attention(
        query[0].transpose(0, 1),
        *cache,
        step.block_table,
        step.context_lens,
        step.cu_rows,
        ancestor_mask=step.ancestor_mask,
        scale=scaling,
        sliding_window=window,
        softcap=softcap or 0.0,
        sinks=s_aux,
        backend=step.backend,
    )
    return cast(Tensor, out)[None, ..., :value_size], None


def no_mask(*args, **kwargs) -> None:
    """Return no mask, because the kernel applies causality and windows."""
    return None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


class PassThroughCache(Cache):
    """Passes keys and values through; the attention function writes them to the pages itself."""

    def __init__(self):
        super().__init__(layers=[])
        # A layer may add this to 0, 1, ... to get the positions of a pass.
        self.num_seen: Tensor | int = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return 0 if layer_idx is None else self.num_seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def cache_name(model: PreTrainedModel) -> str:
    """Return the argument of a model's forward for its cache, which transformers 5.24 renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class PagedModel:
    """A transformers decoder whose attention runs over pages; the given model is not modified.

    Args:
        model: the model to run.
        backend: backend of the kernels.
        kv_cache_dtype: "auto" or "float8", see `EngineConfig`.
        weight_bits: 4 or 8, for a model that drafts; None = the weights as they are.
    Raises:
        ValueError: the model cannot be run this way; the message names it and says why.
    """

    bytes_per_sequence = 0  # besides those of its tokens, for example recurrent states
    decoder_start_id: int | None = None  # only an encoder-decoder has one
    chunk_size: int | None = None  # maximum tokens that chunked_layers attend to
    chunked_layers: tuple[int, ...] = ()
    chains_only: str | None = None  # start of an error message if token trees are not supported
    rotary: RotaryLengths | None = None  # an encoder-decoder has none
    recurrent: RecurrentLayers | None = None  # None if no layer is
    _kept_windows: Mapping[int, int] = MappingProxyType({})  # by layer
    _stateless: frozenset[int] = frozenset()  # layers that neither attend nor keep a state

    def __init__(
        self,
        model: PreTrainedModel,
        backend: str,
        kv_cache_dtype: str = "auto",
        weight_bits: int | None = None,
    ):
        self.backend = backend
        self.name = type(model).__name__
        self.device = model.device
        # Encoders of images or sound, which never run, may have another.
        self.dtype: torch.dtype = getattr(model.get_decoder(), "dtype", model.dtype)
        self.ranks = ranks_of(model)
        self.cache_dtype = self.dtype
        if kv_cache_dtype == "float8":
            _check_float8(self.device, backend)
            self.cache_dtype = torch.float8_e4m3fn
        text_config = model.config.get_text_config(decoder=True)
        if model.get_output_embeddings() is None:
            raise ValueError(f"{self.name}: has no language model head")
        self.vocab_size: int = text_config.vocab_size  # until the trial pass has logits
        self.max_positions = getattr(text_config, "max_position_embeddings", None)
        self._adopt(model)
        self.flat: FlatPass | None = None  # runs passes of up to `most_flat_rows` tokens
        self.most_flat_rows = most_rows(self.device)
        layers: list[FlatLayer] = []
        is_plain = self.decoder_start_id is None and self.recurrent is None
        if is_plain and self.chunk_size is None and not self._counts_positions:
            layers = find_layers(self.model, backend)
        if backend in ("auto", "cpu"):
            use_linear_kernels(self.model)
        self.cache_shapes = self._probe(layers)
        bring = getattr(self.model, "flat_pass", None)  # of drafts that read their target
        own_pass, own_layers = (bring and bring(backend, self.cache_dtype)) or (None, [])
        if weight_bits is not None:
            quantize_linear_layers(self.model, [*layers, *own_layers], weight_bits, backend)
        elif backend in ("auto", "cpu") and self.flat is None:
            use_mlp_kernels(self.model)
        self.flat = own_pass or self.flat

    def forward(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor | None, step: PagedStep
    ) -> Tensor:
        """Run T packed tokens (ids, positions: [T] int64); logits [R, V] of `rows`, None = all."""
        if self._head_needs_rows and rows is not None and not len(rows):
            return self.forward(input_ids, positions, torch.zeros_like(positions[:1]), step)[:0]
        keep: dict[str, Any] = {}
        if self._keeps_logits and rows is not None:
            keep["logits_to_keep"] = rows
        if self.rotary is not None and self.rotary.limit is not None:
            self.rotary.begin(positions, step)
        if self.flat is not None and len(input_ids) <= self.most_flat_rows:
            return self.flat.forward(input_ids, positions, rows, step)
        if self._counts_positions:
            self._cache.num_seen = positions - torch.arange(len(positions), device=self.device)
        if self.recurrent is not None:
            self.recurrent.begin(step.spans)
        if self._takes_positions:
            keep |= {"position_ids": positions[None], self._cache_name: self._cache}
        running = _RUNNING.set(step)
        try:
            logits = self.model(
                input_ids=input_ids[None], use_cache=False, paged_step=step, **keep
            ).logits[0]
        finally:
            _RUNNING.reset(running)
        if self.recurrent is not None:
            self.recurrent.end()
        step.store_inputs()
        return logits if self._keeps_logits or rows is None else logits[rows]

    def chain_parts(self) -> ChainParts | None:
        """Return what `draft_chain` needs to draft with this model; None if its kernel cannot."""
        is_usual = self.cache_dtype == self.dtype and self.ranks is None
        if self.flat is None or not is_usual or self.device.type != "cpu":
            return None
        if backend_of("draft_chain", self.device, self.backend) != "cpu":
            return None
        return self.flat.chain_parts()

    def new_caches(self, num_blocks: int, block_size: int) -> list[CacheStack]:
        """Allocate uninitialised caches; layers with equal head shapes share one allocation.

        Raises:
            ValueError: there is not enough memory.
        """

        def empty(num_layers: int, heads: HeadShape) -> Tensor:
            shape = (num_layers, num_blocks, block_size, *heads)
            return _pages(torch.empty, shape, self.cache_dtype, self.device)

        by_heads: dict[tuple[HeadShape, HeadShape], list[int]] = {}
        for layer, heads in sorted(self.cache_shapes.items()):
            by_heads.setdefault(heads, []).append(layer)
        return [
            CacheStack(layers, empty(len(layers), keys), empty(len(layers), values))
            for (keys, values), layers in by_heads.items()
        ]

    def keep_inputs(self, layers: list[int], num_blocks: int, block_size: int) -> KeptInputs:
        """Allocate zeroed pages for the inputs of these layers, or only for `LAST_STATE`; passes
        that have them as `inputs` fill them.

        Raises:
            ValueError: there are no such layers, or there is not enough memory.
        """
        self.watch_inputs(layers)
        size = self.model.config.get_text_config(decoder=True).hidden_size
        require("hidden_size", size, size % 2 == 0, "an even number, to keep hidden states")
        shape = (2, num_blocks, block_size, len(layers), size // 2)
        keys, values = _pages(torch.zeros, shape, self.dtype, self.device)
        return KeptInputs(layers, (keys, values))

    def watch_inputs(self, layers: list[int]) -> None:
        """Let passes that have pages for the inputs of these layers fill them, see `keep_inputs`.

        Raises:
            ValueError: there are no such layers, or each token has several states between them.
        """
        config = self.model.config.get_text_config(decoder=True)
        if layers != [LAST_STATE] and hasattr(config, "altup_num_inputs"):
            raise ValueError(
                f"target: {self.name} passes its layers several states per token; a draft reads one"
            )
        modules = layers_of(self.model)
        most = len(modules) - 1
        fits = layers == [LAST_STATE] or all(0 <= index <= most for index in layers)
        require("target layers", layers, fits, f"0 to {most}")

        def keep(index: int, hidden: Tensor) -> None:
            if (step := _RUNNING.get()) is not None:
                step.given[index] = hidden[0]

        for index in {*layers} - {LAST_STATE}:
            modules[index].register_forward_pre_hook(
                lambda _, args, kwargs, index=index: keep(
                    index, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        if LAST_STATE in layers:
            self.model.get_decoder().register_forward_hook(
                lambda _, args, output: keep(LAST_STATE, output[0])
            )

    def use_own_columns(self, size: int) -> DraftVocabulary:
        """From now on, return logits only of tokens that a reduced head knows; returns which.

        Only if they are at most half of the target's `size` tokens.
        """
        head = self.model.get_output_embeddings()
        known = head.token_ids if type(head) is ReducedHead else None
        if known is None or 2 * len(known) > size or int(known.max()) >= size:
            return DraftVocabulary(size)
        head.is_spread = False
        self.num_columns = len(known)
        return DraftVocabulary(size, known)

    def resume(self, key: StateKey, start: int) -> int:
        """Return where a sequence's next span must begin if its first `start` tokens are valid."""
        return start if self.recurrent is None else self.recurrent.resume(key, start)

    def bytes_per_token(self) -> int:
        """Return the bytes that one token takes in all layers, plus extra pages of the model."""
        elements = sum(g * d for pair in self.cache_shapes.values() for g, d in pair)
        beside: int = getattr(self.model, "numbers_beside", 0)
        return elements * self.cache_dtype.itemsize + beside * self.dtype.itemsize

    def _adopt(self, model: PreTrainedModel) -> None:
        """Check the model, and make the twin that is run."""
        text_config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_name(model)
        self.model: Any = twin_of(model, ATTENTION_NAME).eval()
        # Layers with packed weights may not support a pass of none.
        self._head_needs_rows = not is_plain_linear(self.model.get_output_embeddings())
        recurrent = RecurrentLayers(self.model, text_config)
        if recurrent.indices:
            self.recurrent = recurrent
            self.chains_only = f"{self.name}: a model with recurrent layers"
        else:
            _check_architecture(model, text_config, self._takes_positions)
        self._cache: Any = PassThroughCache()
        self._counts_positions = bool(getattr(text_config, "attn_temperature_tuning", False))
        types = getattr(text_config, "layer_types", None) or ()
        chunked = tuple(i for i, kind in enumerate(types) if kind == "chunked_attention")
        size = cast(int, getattr(text_config, "attention_chunk_size", None))
        if chunked and (self.max_positions is None or size < self.max_positions):
            self.chunk_size, self.chunked_layers = size, chunked
            self.chains_only = f"{self.name}: a model that attends in chunks"
        self._num_layers = cast(int, text_config.num_hidden_layers)
        self._stateless = frozenset(i for i, kind in enumerate(types) if kind in _STATELESS_TYPES)
        self._kept_windows = _kept_windows(text_config)
        self.rotary = RotaryLengths(self.model, model)

    @torch.inference_mode()
    def _probe(self, layers: list[FlatLayer]) -> dict[int, tuple[HeadShape, HeadShape]]:
        """Run a few tokens to see which layers call our attention, and how.

        layers: layers that may become flat, which is tried on the same tokens.
        """
        calls: list[AttentionCall] = []
        count = TRIAL_TOKENS if layers else 1
        places = torch.arange(count, device=self.device)
        # Far apart, because some models scale queries, but only beyond the first thousands.
        most = (self.max_positions or count) - 1
        positions = places * most // max(count - 1, 1)
        input_ids, first = places * (self.vocab_size // count), places[:1]
        wide = torch.cat([positions, places, first])
        narrow = torch.tensor([count, 0, count, count, 0], dtype=torch.int32, device=self.device)
        key = StateKey()
        spans = [Span([0], 0, count, EncoderInput([0]), state_key=key, settled_len=count)]
        step = PagedStep.of({}, wide, narrow, 1, count, self.backend, spans)
        step.calls = calls
        try:
            with replaced({layer.module: layer.record for layer in layers}):
                logits = self.forward(input_ids, positions, first, step)
        except (ValueError, RuntimeError) as error:
            if len(dtypes := float_dtypes(self.model)) == 1:
                raise
            mixed = f"{self.name}: has weights in {' and '.join(dtypes)}"
            raise ValueError(f"{mixed}, which cannot be combined: {error}") from error
        self.vocab_size = self.num_columns = logits.shape[-1]
        if self.recurrent is not None:
            self.bytes_per_sequence = 2 * self.recurrent.bytes_kept(key)  # two states
        self._check_calls(calls)
        if self.cache_dtype == self.dtype:
            self.flat = flatten(self.model, layers, calls, step, input_ids, logits)
        return {call.layer: (call.key_heads, call.value_heads) for call in calls}

    def _check_calls(self, calls: list[AttentionCall]) -> None:
        """Refuse a model unless each layer attends once, to exactly what `generate` keeps."""
        num_calls = Counter(call.layer for call in calls)
        for layer, count in num_calls.items():
            if count > 1:
                raise ValueError(
                    f"{self.name}: layer {layer} attends {count} times in one pass, but its cache"
                    " only has room for the keys and values of one: not supported"
                )
        if not num_calls.keys() <= set(range(self._num_layers)):
            raise ValueError(f"{self.name}: layers that share their attention are not supported")
        known = num_calls.keys() | self._stateless
        if self.recurrent is not None:
            known |= self.recurrent.indices
        if len(known) != self._num_layers:
            raise ValueError(
                f"{self.name}: {len(known)} of {self._num_layers} layers call transformers'"
                " attention interface; state kept elsewhere cannot be rolled back: not supported"
            )
        for call in calls:
            if call.layer in self.chunked_layers:
                continue
            kept = self._kept_windows.get(call.layer)
            most = self.max_positions
            if kept and kept != call.window and (most is None or kept < most):
                told = f"a window of {call.window}" if call.window else "no window"
                raise ValueError(
                    f"{self.name}: `generate` keeps {kept} tokens of layer {call.layer}, whose"
                    f" attention is given {told}: not supported"
                )


def _kept_windows(text_config: Any) -> dict[int, int]:
    """Return the number of tokens that `generate` keeps, for each layer that drops some."""
    layers = DynamicCache(config=text_config).layers
    windows = (getattr(layer, "sliding_window", None) for layer in layers)
    return {index: window for index, window in enumerate(windows) if window}


def _pages(
    allocate: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Allocate pages [n, num_blocks, block_size, ...]; ValueError if memory is insufficient."""
    try:
        return allocate(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # type and text vary by allocator
        raise ValueError(
            f"num_blocks, kv_cache_memory: not enough memory on {device} for the"
            f" {math.prod(shape) * dtype.itemsize} bytes of {shape[1]} blocks of {shape[2]} tokens"
        ) from error


def _check_float8(device: torch.device, backend: str) -> None:
    """Refuse configurations that would silently run on the slow reference."""
    if backend == "auto":
        backend = os.environ.get("FASTSPEC_BACKEND", "auto")
    is_by_name = backend in ("reference", "triton")
    runs_in_triton = device.type == "cuda" and "triton" in available_backends()
    if not is_by_name and (backend != "auto" or not runs_in_triton):
        raise ValueError(
            f"kv_cache_dtype: the compiled kernels of {device.type} do not support float8 (backend"
            f" {backend!r}); it needs a GPU with Triton, or for tests backend 'reference' or"
            " 'triton'"
        )


def _check_architecture(model: PreTrainedModel, text_config, takes_position_ids: bool) -> None:
    name = type(model).__name__
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = layer_types - _LAYER_TYPES
    if getattr(model, "_is_stateful", False) and not unknown:
        raise ValueError(
            f"{name}: keeps a recurrent state, which cannot be rolled back: not supported"
        )
    if unknown:
        raise ValueError(f"{name}: layers of type {sorted(unknown)} are not supported")
    if not _calls_interface(model):
        raise ValueError(
            f"{name}: never calls transformers' attention interface, so it is not supported"
        )
    if not takes_position_ids:
        raise ValueError(f"{name}: does not accept position_ids, so it is not supported")


def _calls_interface(model: PreTrainedModel) -> bool:
    """Whether the model declares it, or the code of one of its modules shows it."""
    if model.is_backend_compatible():
        return True
    forwards = {inspect.unwrap(type(module).forward) for module in model.modules()}
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(code and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)
