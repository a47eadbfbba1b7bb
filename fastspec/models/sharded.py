"""Targets whose weights are split over processes, by transformers' tensor parallelism."""

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

_PATIENCE = timedelta(minutes=10)  # between calls; inside of a pass the group's own timeout holds
_SHOWN = 300  # characters of a value in an error
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in reprs: another one in each process


class Ranks:
    """The processes that share a model's weights. Rank 0 decides what they do next.

    A pass ends only when all of them run it, on the same tokens. Their logits may differ in the
    last bits and their clocks do, so none may go by its own. All of this waits for all ranks.

    Args:
        group: of these processes.
        device: of the model.
    Attributes:
        rank: of this process in the group.
    """

    def __init__(self, group: "distributed.ProcessGroup", device: torch.device):
        self._group, self._device = group, device
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    _failure: str | None = None

    def least(self, values: list) -> list:
        """The least of all ranks' numbers, place by place."""
        dtype = torch.int64 if isinstance(values[0], int) else torch.float64
        return self.least_of(torch.tensor(values, dtype=dtype, device=self._device)).tolist()

    def least_of(self, values: Tensor) -> Tensor:
        """The same of a tensor, whose place they take."""
        work = distributed.all_reduce(
            values, distributed.ReduceOp.MIN, group=self._group, async_op=True
        )
        if work is not None:
            work.wait(_PATIENCE)
        return values

    def of_first(self, values: Tensor) -> Tensor:
        """Those of rank 0."""
        values = values.contiguous()
        distributed.broadcast(values, group=self._group, group_src=0)
        return values

    def all_of(self, value: Any) -> list[Any]:
        """What each rank has, in order of the ranks."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, self._group)
        return values

    def joined(self, values: Tensor, dim: int) -> Tensor:
        """Those of all ranks, of the same shape each, one after the other in a dimension."""
        own = values.contiguous().view(torch.uint8)  # no group knows all types of numbers
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, self._group)
        return torch.cat([part.view(values.dtype) for part in parts], dim)

    def new_seeds(self) -> Callable[[], int]:
        """What draws seeds, by chance, the same ones on all ranks."""
        (seed,) = self.least([secrets.randbits(63)])
        return partial(Random(seed).getrandbits, 63)

    def check(self, **state: Any) -> None:
        """Raise on all ranks, before any of them waits for a pass, if they do not do the same.

        Args:
            state: parts by name, whose repr is compared.
        Raises:
            RuntimeError: they differ, or one of them does not answer, or this one has failed.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        texts = {name: ADDRESS.sub("", repr(value)) for name, value in state.items()}
        number = crc32(repr(texts).encode())
        try:
            least, most = self.least([number, -number])
            if least == -most:
                return
            others = self.all_of(texts)
        except RuntimeError as error:
            raise self.failed(error) from error
        name = next(name for name in others[0] if len({o.get(name) for o in others}) > 1)
        values = (f"rank {n} has {o.get(name, '')[:_SHOWN]}" for n, o in enumerate(others))
        raise RuntimeError(
            f"tensor parallel: the ranks of a target must do the same, and their {name!r} differs:"
            f" {'; '.join(values)}"
        )

    def failed(self, error: BaseException) -> RuntimeError:
        """Others may wait for this rank, or have left it: nothing runs here any more.

        The error to raise.
        """
        self._failure = (
            f"tensor parallel: rank {self.rank} of {self.size} cannot go on, and its engine cannot"
            " be used again. If the cause is a lost connection or a timeout, another rank has"
            " ended, failed or made other calls, and its own error says why."
            f" {type(error).__name__}: {error}"
        )
        return RuntimeError(self._failure)


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """The processes that hold parts of a model; None for one that is whole.

    Raises:
        ValueError: it is split in another way than by tensor parallelism.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor  # slow to import

    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if not meshes:
        return None
    mesh, *others = meshes
    names = sorted({name for each in meshes for name in each.mesh_dim_names or ("",)})
    if others or mesh.ndim > 1 or "fsdp" in names:
        raise ValueError(
            f"target: the weights of {type(model).__name__} are split over the dimensions {names}"
            " of a mesh of processes; only tensor parallelism over one is supported"
        )
    return Ranks(mesh.get_group(), model.device)


def whole(weight: Tensor) -> Tensor:
    """A weight with the parts that other processes have; all of them must ask for it."""
    full_tensor = getattr(weight, "full_tensor", None)
    return weight if full_tensor is None else full_tensor()
