"""Weights in large pages of memory: processors look up the place of every page that they read."""

import mmap

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_LINE = 64  # bytes, which kernels like to start at


@torch.no_grad()
def use_huge_pages(model: PreTrainedModel, beside: PreTrainedModel | None = None) -> None:
    """Move a model's weights to pages of 2 MiB, one behind the other, where Linux has them.

    Only plain weights on the CPU move, each before the next one takes memory.

    Args:
        beside: a model of which this one may hold weights; they stay where they are.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    kept = set() if beside is None else {weight.data_ptr() for weight in beside.parameters()}
    weights = [
        weight
        for weight in model.parameters()
        if type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
        and weight.data_ptr() not in kept
    ]
    sizes = [-(-weight.nbytes // _LINE) * _LINE for weight in weights]
    if not weights:
        return
    try:
        memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or one that promises no more memory than it has
        return
    offset = 0
    for weight, size in zip(weights, sizes, strict=True):
        place = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=offset)
        weight.data = place.view(weight.shape).copy_(weight)
        offset += size
