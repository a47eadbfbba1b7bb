"""Targets whose weights are split over processes, by transformers' tensor parallelism."""

from collections.abc import Callable

import torch
from torch import distributed
from transformers import PreTrainedModel


def agreement(model: PreTrainedModel) -> Callable[[list], list]:
    """What makes numbers equal on all processes that share a model: the least of theirs.

    All processes run the same steps on the same requests, so what a clock, chance or free memory
    decides has to be the same everywhere; else one would wait for a pass that no other runs.
    """
    if not _is_sharded(model):
        return lambda values: values

    def agreed(values: list) -> list:
        dtype = torch.int64 if isinstance(values[0], int) else torch.float64
        shared = torch.tensor(values, dtype=dtype, device=model.device)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN)
        return shared.tolist()

    return agreed


def _is_sharded(model: PreTrainedModel) -> bool:
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # slow to import

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
