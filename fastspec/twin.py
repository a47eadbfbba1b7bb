"""A model's second tree of modules on the same weights, which the engine may rewire."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec_kernels import available_backends, linear

# Above this many rows torch's matrix product is at its best, and prompts are read in such passes.
_MOST_FEW_ROWS = 64


def twin_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Copy modules and configs, share every parameter and buffer, and set the attention function.

    The user's model is left as it is: its own attention, its own forward passes.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = deepcopy(model, shared)
    for config in _configs_of(twin):
        config._attn_implementation = attention
    return twin


def use_few_row_products(model: PreTrainedModel) -> None:
    """Let linear layers on the CPU multiply few rows with our kernel; its rows are independent."""
    if "cpu" not in available_backends():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            setattr(module, "forward", partial(_linear_forward, module))  # noqa: B010 (typed method)


def _linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    if x.numel() > _MOST_FEW_ROWS * module.in_features:
        return F.linear(x, module.weight, module.bias)
    return linear(x.contiguous(), module.weight, module.bias)


def _configs_of(model: PreTrainedModel) -> Iterator:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            yield config
