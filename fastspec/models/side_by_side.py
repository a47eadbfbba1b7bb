"""Weights that multiply the same rows, next to each other in GPU memory, so that one product of
`decoder_layers` reads them all."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fastspec.models.twin import is_plain_linear

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def move_side_by_side(model: PreTrainedModel, device: torch.device) -> None:
    """Move weights that multiply the same rows from the CPU to a device, next to each other; biases
    likewise.

    Weights that are on another device, as those shared with another model may be, stay there.
    """
    for group in groups_of(model):
        if all(parameter.device.type == "cpu" for parameter in group):
            join(group, device)


def groups_of(model: PreTrainedModel) -> Iterator[list[nn.Parameter]]:
    """Yield the weights, then the biases, of each set of plain projections of the same rows."""
    for module in model.modules():
        for names in _TOGETHER:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if not all(is_plain_linear(part) for part in parts):
                continue
            for group in [part.weight for part in parts], [part.bias for part in parts]:
                if any(each is None for each in group):
                    continue
                if len({(each.dtype, each.shape[1:]) for each in group}) == 1:
                    yield group


@torch.no_grad()
def join(parameters: list[nn.Parameter], device: torch.device) -> None:
    """Move parameters into one allocation on the device, in this order."""
    sizes, first = [*map(len, parameters)], parameters[0]
    joined = torch.empty((sum(sizes), *first.shape[1:]), dtype=first.dtype, device=device)
    for parameter, part in zip(parameters, joined.split(sizes), strict=True):
        parameter.data = part.copy_(parameter)
