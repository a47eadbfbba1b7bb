"""Layers that carry a state from token to token: short convolutions, Mamba, linear attention."""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from fastspec.models.layout import Span, StateKey
from fastspec.models.twin import rebound, replaced, trial_rows

_STATE_METHODS = {"update_conv_state", "update_recurrent_state"}
_CACHE_NAMES = {"cache_params", "past_key_values", "cache"}  # the last from transformers 5.24 on
_UPDATE = "mamba2_selective_state_update"  # transformers' function for a pass over one token
_NO_LIMIT = (0.0, float("inf"))  # of time steps, which are positive
_TRIAL_TOKENS = 3

States = dict[int, Any]  # of one sequence: layers of transformers' cache by layer index


@dataclass
class _Reading:
    """One span of the current pass.

    Attributes:
        settled: leading tokens of the span that are read into `states`; the others into `beyond`.
        states: states after the tokens before the span, and later after the settled ones.
        beyond: states after all tokens; None if all of them are settled.
        kept: the sequence's states after the pass, by number of tokens read.
    """

    span: Span
    settled: int
    states: States
    beyond: States | None
    kept: dict[int, States]


@dataclass(frozen=True)
class _Kind:
    """Properties of a class of modules, found by a trial.

    Attributes:
        cache_name: name of the argument that takes the cache.
        reads_on: whether a call of several tokens goes on from the state before them; some of
            transformers' modules then start from an empty one.
        reads_drafts: whether it also gives what one by one gives, up to float32's rounding, so that
            a text does not depend on what is drafted.
        first: children, all linear, that receive the module's input unchanged.
        last: the linear child whose output is the module's, if there is one.
        of_prompt: the forward pass over tokens of a prompt, if time steps are limited.
    """

    cache_name: str
    reads_on: bool
    reads_drafts: bool
    first: tuple[str, ...]
    last: str | None
    of_prompt: Callable[..., Tensor] | None


class RecurrentLayers:
    """Lets the recurrent layers of a twin read each sequence of a packed pass separately.

    A state cannot be rolled back to fewer tokens. So two are kept per sequence: after the last
    token that is certain to stay in its text (later tokens are read on a copy), and after the last
    token read. The next span begins where `resume` says, and rereads accepted drafts unless all
    were accepted.

    The linear layers that come first and last in such a layer run for all sequences together.

    Mamba-2's `time_step_limit` applies in transformers to passes over several tokens, not to those
    over one; a prompt of one token counts as several, as it has no state before it. So `generate`
    limits the time steps of all tokens of a prompt and of no later ones, and so does this, whatever
    is drafted and however a prompt is split. `Span.first_read_len` tells where it ends.

    Args:
        twin: the model to run; the forward passes of its recurrent layers are replaced.
        text_config: configuration of its decoder.
    Raises:
        ValueError: recurrent layers of a form that cannot be run separately, or that limit time
            steps in another way.
    """

    def __init__(self, twin: PreTrainedModel, text_config: Any):
        modules: list[Any] = [module for module in twin.modules() if _is_recurrent(module)]
        self.indices = {module.layer_idx for module in modules}
        self._kept: WeakKeyDictionary[StateKey, dict[int, States]] = WeakKeyDictionary()
        self._readings: list[_Reading] = []
        if not modules:
            return
        if len(modules) > len(self.indices):
            raise ValueError(
                f"{type(twin).__name__}: keeps several states in a layer, not supported"
            )
        self._cache = DynamicCache(config=text_config)
        self._unused = {index: self._cache.layers[index] for index in self.indices}
        self._kinds: dict[type, _Kind] = {}
        for module in modules:
            if type(module) not in self._kinds:
                size = text_config.hidden_size
                trial = trial_rows(2 * _TRIAL_TOKENS, size, twin.device, twin.dtype)
                self._kinds[type(module)] = self._try(module, trial[None])
            module.__dict__["forward"] = partial(self._forward, module)

    def resume(self, key: StateKey, start: int) -> int:
        """Return how many of the first `start` tokens need not be reread.

        Those of them that were read must still be in the text.
        """
        return max((n for n in self._kept.get(key, ()) if n <= start), default=0)

    def begin(self, spans: list[Span]) -> None:
        """Start a pass over these spans; until `end`, no states of their sequences are kept."""
        self._readings = [self._open(span) for span in spans]

    def end(self) -> None:
        """Keep the states of a pass that has succeeded."""
        for reading in self._readings:
            if (key := reading.span.state_key) is not None:
                self._kept[key] = reading.kept
        self._readings = []

    def bytes_kept(self, key: StateKey) -> int:
        """Return the bytes of all states of a sequence."""
        layers = [layer for states in self._kept[key].values() for layer in states.values()]
        return sum(tensor.nbytes for layer in layers for tensor in _tensors(layer))

    def _open(self, span: Span) -> _Reading:
        start, end, settled = span.start, span.start + span.count, span.settled_len
        kept = self._kept.pop(span.state_key, {}) if span.state_key is not None else {}
        states = kept.get(start) if start else {}
        if states is None:
            raise ValueError(f"start: the states after {start} tokens are not kept")
        if start <= settled < end:
            beyond: States = {}
            kept = {settled: states, end: beyond}
            return _Reading(span, settled - start, states, beyond, kept)
        kept = {length: older for length, older in kept.items() if length <= settled < start}
        return _Reading(span, span.count, states, None, {**kept, end: states})

    def _forward(self, module: Any, hidden_states: Tensor, **kwargs) -> Tensor:
        """Compute the module's output [1, T, E] for packed spans; ignore masks and other caches."""
        index, kind = module.layer_idx, self._kinds[type(module)]
        read = partial(_read, module, kind, self._cache)
        last = getattr(module, kind.last) if kind.last else None
        projected = {name: getattr(module, name)(hidden_states) for name in kind.first}
        place, first, out = slice(0), 0, []

        def run(layer: Any, start: int, end: int, is_prompt: bool) -> None:
            nonlocal first, place
            at_once = not start or (kind.reads_on if is_prompt else kind.reads_drafts)
            step = end - start if at_once else 1
            for _ in range(start, end, step or 1):
                place = slice(first, first + step)
                first += step
                out.append(read(layer, hidden_states[:, place], is_prompt))

        forwards: dict[nn.Module, Callable] = {
            getattr(module, name): lambda _, rows=rows: rows[:, place]
            for name, rows in projected.items()
        }
        if last is not None:
            forwards[last] = lambda rows: rows
        with replaced(forwards):
            for reading in self._readings:
                span, settled = reading.span, reading.settled
                layer = reading.states.get(index)
                if layer is None:
                    layer = reading.states[index] = _copied(self._unused[index])
                start, end = span.start, span.start + settled
                prompt_end = min(max(start, span.first_read_len), end)
                run(layer, start, prompt_end, True)
                run(layer, prompt_end, end, False)
                if reading.beyond is not None:  # follows the prompt, which is settled
                    layer = reading.beyond[index] = _copied(layer)
                    run(layer, end, span.start + span.count, False)
        rows = torch.cat(out, dim=1)
        return rows if last is None else last(rows)

    @torch.inference_mode()
    def _try(self, module: Any, trial: Tensor) -> _Kind:
        """Run a module over tokens [1, T, E], the later ones both in one call and one by one.

        Raises:
            ValueError: it takes or returns anything other than hidden states, or limits its time
                steps in a way that is not known.
        """
        cache_name, module_name = _cache_name(module), type(module).__name__
        kind = _Kind(cache_name, True, True, (), None, _forward_of_prompt(module))
        before, after = trial.chunk(2, dim=1)
        calls: list[tuple[set[str], set[str]]] = []

        def call(layer: Any, hidden: Tensor) -> Tensor:
            seen: list[tuple[str, Tensor, Tensor]] = []
            children: list[tuple[str, Any]] = [*module.named_children()]
            linear = [(n, child) for n, child in children if type(child) is nn.Linear]
            hooks = [
                child.register_forward_hook(
                    lambda _, given, made, n=n: seen.append((n, given[0], cast(Tensor, made)))
                )
                for n, child in linear
            ]
            try:
                out = _read(module, kind, self._cache, layer, hidden, False)
            except RuntimeError as error:
                raise ValueError(f"{module_name}: fails on only hidden states: {error}") from error
            finally:
                for hook in hooks:
                    hook.remove()
            if not isinstance(out, Tensor):
                raise ValueError(f"{module_name}: returns more than hidden states, not supported")
            names = [n for n, _, _ in seen]
            once = [each for each in seen if names.count(each[0]) == 1]
            calls.append(
                ({n for n, x, _ in once if x is hidden}, {n for n, _, y in once if y is out})
            )
            return out

        one_by_one = _copied(self._unused[module.layer_idx])
        call(one_by_one, before)
        settled, at_once = _copied(one_by_one), _copied(one_by_one)
        singles = torch.cat([call(one_by_one, token) for token in after.split(1, dim=1)], dim=1)
        several = call(at_once, after)
        results = [several, *_tensors(at_once)]
        pairs = [*zip(results, [singles, *_tensors(one_by_one)], strict=True)]

        def agrees(dtype: torch.dtype) -> bool:  # with zeros, both ways do whatever they compute
            tolerance = torch.finfo(dtype).eps ** 0.5
            return all(b.any() and (a - b).norm() <= tolerance * b.norm() for a, b in pairs)

        def uses(state: int) -> bool:  # a state may matter so little that dropping it still agrees
            layer = _copied(settled)
            _tensors(layer)[state].zero_()
            others = [call(layer, after), *_tensors(layer)]
            return not all(map(torch.equal, others, results))

        reads_on = agrees(trial.dtype) and all(map(uses, range(len(_tensors(settled)))))
        reads_drafts = reads_on and agrees(torch.float32)
        first, last = (set.intersection(*sets) for sets in zip(*calls, strict=True))
        return replace(
            kind,
            reads_on=reads_on,
            reads_drafts=reads_drafts,
            first=tuple(sorted(first)),
            last=next(iter(last), None),
        )


def _read(
    module: Any, kind: _Kind, cache: DynamicCache, layer: Any, hidden: Tensor, is_prompt: bool
) -> Tensor:
    """Run the module's own forward on one sequence, whose state is in a layer of a cache."""
    cache.layers[module.layer_idx] = layer
    forward, attributes = type(module).forward, {}
    longest = getattr(module, "chunk_size", None)
    if longest is not None:  # anything shorter than a chunk would be padded
        attributes["chunk_size"] = min(longest, hidden.shape[1])
    if kind.of_prompt is not None:
        if is_prompt:
            forward = kind.of_prompt
        else:
            attributes["time_step_limit"] = _NO_LIMIT
    before = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        return forward(module, hidden, **{kind.cache_name: cache})
    finally:
        vars(module).update(before)


def _forward_of_prompt(module: Any) -> Callable[..., Tensor] | None:
    """Return a forward that limits the time step of a single token too; None if nothing does.

    Raises:
        ValueError: it is not known how passes over one token compute it.
    """
    limit = getattr(module, "time_step_limit", None)
    if limit is None or tuple(limit) == _NO_LIMIT:
        return None
    forward = cast(FunctionType, inspect.unwrap(type(module).forward))
    update = forward.__globals__.get(_UPDATE)
    if update is None or _UPDATE not in forward.__code__.co_names:
        raise ValueError(
            f"{type(module).__name__}: limits its time steps in a way that is not supported"
        )

    def limited(
        state: Tensor, inputs: Tensor, dt: Tensor, *args, dt_bias: Tensor, dt_softplus: bool, **rest
    ) -> Tensor:
        dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*limit)
        return update(state, inputs, dt, *args, **rest)

    return rebound(forward, _UPDATE, limited)


def _is_recurrent(module: nn.Module) -> bool:
    """Whether transformers' cache keeps a state for this module."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_names if code is not None else ()
    return not _STATE_METHODS.isdisjoint(names) and hasattr(module, "layer_idx")


def _cache_name(module: nn.Module) -> str:
    parameters = inspect.signature(type(module).forward).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty]
    names = [name for name in parameters if name in _CACHE_NAMES]
    if len(names) != 1 or not {"self", "hidden_states", "kwargs", *names}.issuperset(required):
        raise ValueError(f"{type(module).__name__}: takes more than hidden states, not supported")
    return names[0]


def _copied(layer: Any) -> Any:
    """Copy a layer of a cache, with its states."""
    other = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(other, name, {key: _cloned(each) for key, each in value.items()})
        else:
            setattr(other, name, _cloned(value))
    return other


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(layer: Any) -> list[Tensor]:
    """Return the states in a layer of a cache."""
    values = vars(layer).values()
    parts = [part for v in values for part in (v.values() if isinstance(v, dict) else [v])]
    return [part for part in parts if isinstance(part, Tensor)]
