"""A second module tree on a model's weights, with our attention and, on a CPU, our kernels."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec_kernels import (
    available_backends,
    cpu_instruction_set,
    gated_mlp,
    linear,
    rms_norm,
)

Forward = Callable[[Tensor], Tensor]

# For the kernels' portable code: above this many rows torch's matrix product is several times as
# fast. With AVX2 or better the kernels keep up with it, and handle any number of rows.
_MOST_ROWS_OF_PORTABLE_CODE = 256

WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
# In the forward of a gated feed-forward block; SeedOss has dropout, which does nothing here.
_NAMES_OF_GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"} | {
    *("nn", "functional", "dropout", "residual_dropout", "training")
}
# All compute the same attention, as do kernels from the hub, whose names have a slash.
_ATTENTION_FUNCTIONS = {"eager", "sdpa", "flex_attention"} | {
    f"flash_attention_{version}" for version in (2, 3, 4)
}
_ROTATION = "apply_rotary_pos_emb"  # the function's name in transformers' models


def twin_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Copy modules and configs, share every parameter and buffer, and set the attention function.

    The user's model keeps its own attention and forward passes.

    Raises:
        ValueError: the model attends by a function that is not one of transformers' own.
    """
    for config in configs_of(model):
        own = config._attn_implementation
        if own is not None and "/" not in own and own.split("|")[-1] not in _ATTENTION_FUNCTIONS:
            raise ValueError(
                f"{type(model).__name__}: attends by {own!r}, which is not one of transformers' own"
                " functions and may compute something else"
            )
    twin = copy_of_modules(model)
    for config in configs_of(twin):
        config._attn_implementation = attention
    return twin


def copy_of_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configs, sharing its parameters, its buffers, and what modules
    compute from them before a pass, as pruned ones do (deepcopy refuses it)."""
    plain = (value for module in model.modules() for value in vars(module).values())
    computed = (value for value in plain if isinstance(value, Tensor) and not value.is_leaf)
    shared = (*model.parameters(), *model.buffers(), *computed)
    return deepcopy(model, {id(tensor): tensor for tensor in shared})


class TwinSource:
    """Notices that a model has changed since its twin was made, which keeps the old parts."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._parts = model, _parts_of(model)

    def check_unchanged(self) -> None:
        """Raise a ValueError if the model has other modules, parameters, hooks or active adapters.

        New values in the same parameters reach the twin.
        """
        if _parts_of(self._model) != self._parts:
            raise ValueError(
                f"target: modules, parameters, hooks or adapters of the"
                f" {type(self._model).__name__} have been replaced since the engine was made; make"
                " a new engine"
            )


# Whose hooks are for training or record outputs, and would change nothing in a twin.
_HOOKS_OF_LIBRARIES = ("transformers.", "peft.")


def _parts_of(model: PreTrainedModel) -> list[Any]:
    parts: list[Any] = []
    for module in model.modules():
        parts.append(module)
        for weight in module._parameters.values():
            if weight is not None:
                address = weight.data_ptr() if weight.is_cuda else 0  # CUDA graphs read there
                parts.append((id(weight), weight.dtype, weight.device, address))
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            if not str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF_LIBRARIES):
                parts.append(hook)
        if hasattr(module, "merged_adapters"):  # PEFT's layers
            layer: Any = module
            merged, active = [*layer.merged_adapters], [*layer.active_adapters]
            parts.append((merged, active, layer.disable_adapters))
    return parts


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Copy a decoder, sharing weights, with only its first layers, its norm and its head.

    Raises:
        ValueError: its layers are not in one list.
    """
    copy = copy_of_modules(model)
    size = copy.config.get_text_config(decoder=True).num_hidden_layers
    modules: Any = copy.get_decoder().modules()  # an encoder of images may have as many
    lists = [m for m in modules if isinstance(m, nn.ModuleList) and len(m) == size]
    if len(lists) != 1:
        raise ValueError(f"{type(model).__name__}: {len(lists)} lists of {size} layers, not one")
    del lists[0][count:]
    if getattr(copy.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        copy.config = deepcopy(copy.config)  # by its own, the decoder splits inputs of all layers
    text_config: Any = copy.config.get_text_config(decoder=True)
    if shared := getattr(text_config, "num_kv_shared_layers", None):
        text_config.num_kv_shared_layers = max(0, count - (size - shared))
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:count]
    text_config.num_hidden_layers = count
    return copy


@contextmanager
def replaced(forwards: Mapping[Any, Callable]) -> Iterator[None]:
    """Temporarily replace the modules' forward passes by other functions."""
    before = [(module.__dict__, module.__dict__.get("forward")) for module in forwards]
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for attributes, forward in before:
            attributes.pop("forward")
            if forward is not None:
                attributes["forward"] = forward


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a decoder.

    Raises:
        ValueError: they are not where transformers' decoders have them.
    """
    layers: Any = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"target: {type(model).__name__} has no list of decoder layers")
    return layers


def most_rows(device: torch.device) -> float:
    """Return the tokens above which passes use torch's matmul, whose rows are not independent."""
    is_portable = device.type == "cpu" and cpu_instruction_set() == "portable"
    return _MOST_ROWS_OF_PORTABLE_CODE if is_portable else math.inf


def use_linear_kernels(model: PreTrainedModel) -> None:
    """Make a model on the CPU use our kernels, whose rows are independent.

    Linear layers always; normalisations if our kernel is as exact on a trial input, so a variant
    that only looks similar keeps its own code, as do modules with hooks.
    """
    for module in _modules_on_cpu(model):
        if is_plain_linear(module):
            ours = _with_kernel(module, lambda x, m=module: linear(x, m.weight, m.bias))
            module.__dict__["forward"] = ours
        elif _is_rms_norm(module) and is_plain(module):
            _take_over(module, lambda x, m=module: rms_norm(x, m.weight, m.variance_epsilon))


def use_mlp_kernels(model: PreTrainedModel) -> None:
    """Make a model on the CPU use our kernels for gated feed-forward blocks."""
    for module in _modules_on_cpu(model):
        if _is_gated_mlp(module):
            weights = [
                layer.weight for layer in (module.gate_proj, module.up_proj, module.down_proj)
            ]
            _take_over(module, lambda x, weights=weights: gated_mlp(x, *weights))


def _modules_on_cpu(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the modules of a model that our kernels can replace."""
    if model.device.type == "cpu" and "cpu" in available_backends():
        yield from model.modules()


def compile_modules(model: PreTrainedModel) -> None:
    """Let torch.compile fuse normalisations, gated feed-forward blocks and rotations.

    Works on any device. Modules that already use one of our kernels keep it. Modules of a class
    share one compiled function, for any number of rows. In attention only the rotation of queries
    and keys is compiled, if it is transformers' own function.
    """
    compiled: dict[type, Callable | None] = {}
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        kind = type(module)
        if kind not in compiled:
            is_fusible = kind.__name__.endswith("RMSNorm") or hasattr(module, "gate_proj")
            forward = kind.forward
            compiled[kind] = _compiled(forward) if is_fusible else _with_compiled_rotation(forward)
        if forward := compiled[kind]:
            module.__dict__["forward"] = partial(forward, module)


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def _with_compiled_rotation(forward: Callable) -> Callable | None:
    """Return a forward with a compiled rotation; None if it uses no rotation of that name."""
    forward = inspect.unwrap(forward)  # of what renames arguments
    if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    if (rotation := forward.__globals__.get(_ROTATION)) is None:
        return None  # a method of that name
    return rebound(forward, _ROTATION, _compiled(rotation))


def rebound(function: FunctionType, name: str, other: Callable) -> FunctionType:
    """Copy a function, with another function under one of its global names."""
    names = function.__globals__ | {name: other}
    defaults, closure = function.__defaults__, function.__closure__
    copy = FunctionType(function.__code__, names, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _with_kernel(module: Any, kernel: Forward) -> Forward:
    """Return the module's forward, with a kernel for dtypes no wider than its weights."""
    theirs, weight = type(module).forward, _weight_of(module)
    most, most_bytes = most_rows(weight.device), weight.dtype.itemsize

    def forward(x: Tensor) -> Tensor:
        # A sum kept in float32 is wider.
        if x.dtype.itemsize > most_bytes or x.numel() > most * x.shape[-1]:
            return theirs(module, x)
        return kernel(x.contiguous())

    return forward


def _weight_of(module: Any) -> Tensor:
    return getattr(module, "gate_proj", module).weight


def is_plain(module: nn.Module) -> bool:
    """Whether only its class's forward, or our kernel instead, runs: no hooks."""
    forward = module.__dict__.get("forward")
    is_own = forward is not None and getattr(forward, "__module__", None) != __name__
    return not (is_own or module._forward_hooks or module._forward_pre_hooks)


def is_plain_linear(module: Any) -> bool:
    """Whether kernels read its weight; packed and strided weights keep their layers."""
    if type(module) is not nn.Linear or not is_plain(module):
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype in WIDER and weight.is_contiguous()


def is_as_exact(ours: Tensor, theirs: Tensor, truth: Tensor) -> bool:
    """Whether each of our rows is about as close to the truth, in a wider dtype, as theirs.

    A truth of zeros proves nothing: other values may be written to the weights later.
    """

    def error(rows: Tensor) -> Tensor:
        return (rows.to(truth.dtype) - truth).norm(dim=-1)

    rounding = 2 * torch.finfo(torch.float32).eps * truth.norm(dim=-1)
    return bool(truth.any() and (error(ours) <= 4 * error(theirs) + rounding).all())


def trial_rows(count: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return rows [count, size] to try a module on."""
    values = torch.linspace(-9.0, 9.0, count * size, dtype=torch.float32, device=device)
    return values.sin().view(count, size).to(dtype)


def wider_copy(module: Any, dtype: torch.dtype) -> Any:
    """A copy with weights of a wider type, without our kernels."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.to(dtype), False) for weight in module.parameters()
    }
    copy = deepcopy(module, memo)
    for part in copy.modules():
        part.__dict__.pop("forward", None)  # one of our kernels
    return copy


@torch.inference_mode()
def _take_over(module: Any, kernel: Forward) -> None:
    """Replace a module's forward by a kernel if that is as exact on a trial input."""
    weight, forward = _weight_of(module), _with_kernel(module, kernel)
    size = weight.shape[-1]
    trial = trial_rows(2, size, weight.device, weight.dtype)
    wider = WIDER[weight.dtype]
    truth = wider_copy(module, wider)
    theirs = type(module).forward(module, trial)
    if is_as_exact(forward(trial), theirs, truth(trial.to(wider))):
        module.__dict__["forward"] = forward


def eps_of(module: nn.Module) -> float | None:
    """Return eps of an RMSNorm that our kernel computes; None for any other module."""
    runs_kernel = _is_rms_norm(module) and is_plain(module) and "forward" in vars(module)
    return cast(float, module.variance_epsilon) if runs_kernel else None


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_norm = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return is_norm and isinstance(weight, Tensor) and weight.dtype in WIDER


def _is_gated_mlp(module: nn.Module) -> bool:
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return computes_gated_mlp(module) and all(
        is_plain_linear(layer) and layer.bias is None  # pyright: ignore[reportOptionalMemberAccess]
        for layer in layers
    )


def computes_gated_mlp(module: nn.Module) -> bool:
    """Whether the forward of a feed-forward block names nothing but its layers, activation and
    dropout.

    A trial alone cannot tell: a block that clamps large values computes the same for all others.
    """
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return is_plain(module) and code is not None and {*code.co_names} <= _NAMES_OF_GATED_MLP


def configs_of(model: nn.Module) -> Iterator:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            yield config
