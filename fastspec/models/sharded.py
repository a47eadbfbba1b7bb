"""Targets whose weights are split over processes by transformers' tensor parallelism."""

import re
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

_PATIENCE = timedelta(minutes=10)  # between calls; within a pass the group's own timeout applies
_SHOWN = 300  # characters of a value in an error
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in reprs; differs between processes


class Ranks:
    """The processes that share a model's weights; rank 0 decides what they do next.

    A pass ends only when all ranks run it on the same tokens. Their logits may differ in the last
    bits and their clocks do differ, so no rank may act on its own. All methods wait for all ranks.

    Args:
        group: the group of these processes.
        device: the model's device.
    Attributes:
        rank: rank of this process in the group.
    """

    def __init__(self, group: "distributed.ProcessGroup", device: torch.device):
        self._group, self._device = group, device
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._failure: str | None = None

    def all_reduce_min(self, values: list) -> list:
        """Return the elementwise minimum of all ranks' numbers."""
        dtype = torch.int64 if isinstance(values[0], int) else torch.float64
        return self.all_reduce_min_(torch.tensor(values, dtype=dtype, device=self._device)).tolist()

    def all_reduce_min_(self, values: Tensor) -> Tensor:
        """Compute the elementwise minimum of all ranks' tensors in place."""
        work = distributed.all_reduce(
            values, distributed.ReduceOp.MIN, group=self._group, async_op=True
        )
        if work is not None:
            work.wait(_PATIENCE)
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Return rank 0's values."""
        values = values.contiguous()
        distributed.broadcast(values, group=self._group, group_src=0)
        return values

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return each rank's value, in order of the ranks."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, self._group)
        return values

    def all_gather(self, values: Tensor, dim: int) -> Tensor:
        """Concatenate the equally shaped values of all ranks along a dimension."""
        own = values.contiguous().view(torch.uint8)  # no group supports all dtypes
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, self._group)
        return torch.cat([part.view(values.dtype) for part in parts], dim)

    def new_seeds(self) -> Callable[[], int]:
        """Return a generator of random seeds that are the same on all ranks."""
        (seed,) = self.all_reduce_min([secrets.randbits(63)])
        return partial(Random(seed).getrandbits, 63)

    def check(self, **state: Any) -> None:
        """Raise on all ranks, before any of them waits for a pass, unless their states agree.

        Args:
            state: parts by name, compared by their repr.
        Raises:
            RuntimeError: the states differ, a rank does not answer, or this one has failed.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        texts = {name: ADDRESS.sub("", repr(value)) for name, value in state.items()}
        number = crc32(repr(texts).encode())
        try:
            least, most = self.all_reduce_min([number, -number])
            if least == -most:
                return
            others = self.all_gather_objects(texts)
        except RuntimeError as error:
            raise self.failed(error) from error
        name = next(name for name in others[0] if len({o.get(name) for o in others}) > 1)
        values = (f"rank {n} has {o.get(name, '')[:_SHOWN]}" for n, o in enumerate(others))
        raise RuntimeError(
            f"tensor parallel: the ranks of a target must do the same, but their {name!r} differs:"
            f" {'; '.join(values)}"
        )

    def failed(self, error: BaseException) -> RuntimeError:
        """Stop this rank for good, as others may wait for it or have left it.

        Returns the error to raise.
        """
        self._failure = (
            f"tensor parallel: rank {self.rank} of {self.size} cannot continue, and its engine"
            " cannot be used again. If the cause is a lost connection or a timeout, another rank"
            " has ended, failed or made other calls; see its error."
            f" {type(error).__name__}: {error}"
        )
        return RuntimeError(self._failure)


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """Return the processes that have parts of a model; None if it is whole.

    Raises:
        ValueError: it is split by anything other than tensor parallelism.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule  # slow to import, as the next one
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if not meshes:
        return None
    mesh, *others = meshes
    names = sorted({name for each in meshes for name in each.mesh_dim_names or ("",)})
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"target: {type(model).__name__} is wrapped by FSDP, not supported; load it whole, or"
            " with transformers' tensor parallelism"
        )
    if others or mesh.ndim > 1:
        raise ValueError(
            f"target: the weights of {type(model).__name__} are split over the dimensions {names}"
            " of a mesh of processes; only tensor parallelism over one is supported"
        )
    return Ranks(mesh.get_group(), model.device)


def whole(weight: Tensor) -> Tensor:
    """Return a weight joined from all processes; all of them must call this."""
    full_tensor = getattr(weight, "full_tensor", None)
    return weight if full_tensor is None else full_tensor()
