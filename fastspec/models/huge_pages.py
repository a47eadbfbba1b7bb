"""Weights in huge pages of memory, to reduce TLB misses."""

import mmap

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_LINE = 64  # bytes; kernels run best on aligned data


@torch.no_grad()
def use_huge_pages(model: PreTrainedModel, beside: PreTrainedModel | None = None) -> None:
    """Move a model's weights to contiguous pages of 2 MiB, if Linux provides them.

    Only plain weights on the CPU move, one at a time to limit peak memory.

    Args:
        beside: a model that may share weights with this one; shared weights do not move.
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
    except OSError:  # a kernel without huge pages, or without memory overcommit
        return
    offset = 0
    for weight, size in zip(weights, sizes, strict=True):
        place = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=offset)
        weight.data = place.view(weight.shape).copy_(weight)
        offset += size
