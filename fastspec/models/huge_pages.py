"""Weights in huge pages of memory, to reduce TLB misses."""

import mmap
from collections.abc import Sequence

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
    for weight, place in zip(weights, places_for(weights) or (), strict=False):
        weight.data = place.copy_(weight)


def places_for(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return uninitialised tensors like these, none empty, in huge pages; None if there are none.

    They share one mapping, which lives as long as any of them.
    """
    if not tensors or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    sizes = [-(-tensor.nbytes // _LINE) * _LINE for tensor in tensors]
    try:
        memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or without memory overcommit
        return None
    places, offset = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        places.append(flat.view(tensor.shape))
        offset += size
    return places
