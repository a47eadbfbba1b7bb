"""Layers that carry a state from token to token: short convolutions, Mamba, linear attention."""

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from fastspec.models.paged_model import Span

_STATE_METHODS = {"update_conv_state", "update_recurrent_state"}
_CACHE_NAMES = {"cache_params", "past_key_values"}
_TRIAL_TOKENS = 3

Layers = dict[int, Any]  # by layer index, what transformers' cache keeps of one sequence there


@dataclass(eq=False)
class StateKey:
    """Stands for a text while its tokens are cached; each model keeps its states as long."""


@dataclass
class _Reading:
    """One span of the pass that runs.

    Attributes:
        settled: leading tokens of it that stay in the text.
        states: after the tokens before the span, then after the settled ones.
        beyond: the same after all of its tokens, where not all are settled.
        kept: what will be kept of the sequence after the pass, by number of tokens read.
    """

    span: "Span"
    settled: int
    states: Layers
    beyond: Layers | None
    kept: dict[int, Layers] = field(default_factory=dict)


class RecurrentLayers:
    """Lets the recurrent layers of a twin read each sequence of a packed pass on its own.

    A state cannot be shortened. Two are kept of each sequence: after the last token that is certain
    to stay in its text, where the drafts after it are read on a copy, and after the last token that
    was read. Whoever reads on begins where `resume` says, and reads rejected drafts' place anew.

    Several tokens are read in one call where the layer goes on from a state as it does token by
    token, which a trial at load tells; some of transformers' layers then begin from nothing.

    Args:
        twin: what runs; the forward passes of its recurrent layers are replaced.
        text_config: of its decoder.
    """

    def __init__(self, twin: PreTrainedModel, text_config: Any):
        self._modules: dict[int, Any] = {
            module.layer_idx: module for module in twin.modules() if _is_recurrent(module)
        }
        self._kept: WeakKeyDictionary[StateKey, dict[int, Layers]] = WeakKeyDictionary()
        self._readings: list[_Reading] = []
        if not self._modules:
            return
        self._cache = DynamicCache(config=text_config)
        self._new_layers = {layer: self._cache.layers[layer] for layer in self._modules}
        self._reads_on: dict[type, bool] = {}
        for module in self._modules.values():
            kind = type(module)
            if kind not in self._reads_on:
                self._reads_on[kind] = self._try_reading_on(module, text_config.hidden_size)
            module.__dict__["forward"] = partial(self._forward, module)

    @property
    def indices(self) -> set[int]:
        """Of the recurrent layers in the model; empty where it has none."""
        return set(self._modules)

    def resume(self, key: StateKey, start: int) -> int:
        """Tokens before `start` whose states are kept: the next span has to begin after these.

        All that was read of the first `start` tokens still stands in the text.
        """
        return max((n for n in self._kept.get(key, ()) if n <= start), default=0)

    def begin(self, spans: "Sequence[Span]") -> None:
        """The next pass reads these spans; if it fails, their sequences are read from the start."""
        self._readings = [self._open(span) for span in spans]

    def end(self) -> None:
        """The pass has succeeded."""
        for reading in self._readings:
            if (key := reading.span.state_key) is not None:
                self._kept[key] = reading.kept
        self._readings = []

    def bytes_kept(self, key: StateKey) -> int:
        """Bytes of the states of a sequence that has been read, where two of each are kept."""
        (layers,) = self._kept[key].values()
        return 2 * sum(tensor.nbytes for layer in layers.values() for tensor in _tensors(layer))

    def _open(self, span: "Span") -> _Reading:
        start, end = span.start, span.start + span.count
        kept = self._kept.pop(span.state_key, {}) if span.state_key is not None else {}
        states = kept.get(start) if start else {}
        if states is None:
            raise ValueError(f"start: the states after {start} tokens are not kept")
        if end <= span.settled_len:
            return _Reading(span, span.count, states, None, {end: states})
        if start > span.settled_len:
            older = {n: layers for n, layers in kept.items() if n <= span.settled_len}
            return _Reading(span, span.count, states, None, {**older, end: states})
        settled, beyond = span.settled_len - start, {}
        return _Reading(span, settled, states, beyond, {span.settled_len: states, end: beyond})

    def _forward(self, module: Any, hidden_states: Tensor, **kwargs) -> Tensor:
        """The module's output [1, T, E] for packed spans; masks and other caches mean nothing."""
        index, first, out = module.layer_idx, 0, []
        for reading in self._readings:
            span, settled = reading.span, reading.settled
            pieces = hidden_states[:, first : first + span.count].tensor_split((settled,), dim=1)
            first += span.count
            layer = reading.states.get(index)
            if layer is None:
                layer = reading.states[index] = _copied(self._new_layers[index])
            out.append(self._read(module, pieces[0], layer, span.start))
            if reading.beyond is not None:
                layer = reading.beyond[index] = _copied(layer)
                out.append(self._read(module, pieces[1], layer, span.start + settled))
        return torch.cat(out, dim=1)

    def _read(self, module: Any, hidden: Tensor, layer: Any, start: int) -> Tensor:
        """Read tokens [1, T, E] that follow `start` others, whose state the layer holds."""
        if not hidden.shape[1]:
            return hidden
        is_whole = not start or self._reads_on[type(module)]
        pieces = [hidden] if is_whole else hidden.split(1, dim=1)
        return torch.cat([_call(module, self._cache, layer, piece) for piece in pieces], dim=1)

    @torch.inference_mode()
    def _try_reading_on(self, module: Any, size: int) -> bool:
        """Whether several tokens in one call leave what they leave token by token."""
        weight = next(module.parameters())
        rows = torch.linspace(-9.0, 9.0, 2 * _TRIAL_TOKENS * size, device=weight.device).sin()
        before, after = rows.view(1, -1, size).to(weight.dtype).chunk(2, dim=1)
        one_by_one = _copied(self._new_layers[module.layer_idx])
        _call(module, self._cache, one_by_one, before)
        at_once = _copied(one_by_one)
        singles = [_call(module, self._cache, one_by_one, x) for x in after.split(1, 1)]
        several = _call(module, self._cache, at_once, after)
        ours, theirs = [several, *_tensors(at_once)], [torch.cat(singles, 1), *_tensors(one_by_one)]
        tolerance = torch.finfo(weight.dtype).eps ** 0.5
        return all(
            bool((a - b).float().norm() <= tolerance * b.float().norm())
            for a, b in zip(ours, theirs, strict=True)
        )


def _call(module: Any, cache: DynamicCache, layer: Any, hidden: Tensor) -> Tensor:
    """The module's own forward over one sequence, with its state in the cache's layer."""
    forward = type(module).forward
    cache.layers[module.layer_idx] = layer
    (name,) = _CACHE_NAMES & inspect.signature(forward).parameters.keys()
    longest = getattr(module, "chunk_size", None)
    if longest is None:
        return forward(module, hidden, **{name: cache})
    module.chunk_size = min(longest, hidden.shape[1])  # a short text would be filled up
    try:
        return forward(module, hidden, **{name: cache})
    finally:
        module.chunk_size = longest


def _is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer whose state transformers' cache keeps."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return not _STATE_METHODS.isdisjoint(names) and hasattr(module, "layer_idx")


def _tensors(layer: Any) -> list[Tensor]:
    """The states in a layer of a cache."""
    values = [v for value in vars(layer).values() for v in _values(value)]
    return [value for value in values if isinstance(value, Tensor)]


def _copied(layer: Any) -> Any:
    """A layer of a cache with states of its own."""
    other = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(other, name, {key: _clone(each) for key, each in value.items()})
        else:
            setattr(other, name, _clone(value))
    return other


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]
