"""What would make the host wait for a GPU, found on the CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING_OPS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result the host has to know before it can go on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        indices = args[1] if "index" in name and len(args) > 1 else None
        by_mask = isinstance(indices, (list, tuple)) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices
        )
        if name in WAITING_OPS or by_mask:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def count_readings(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors that are read back from now on; uploads must not wait either.

    `torch.tensor(values, device=...)` waits until a GPU has the values; `device_tensor` does not,
    as it makes them on the "cpu" first.
    """
    shapes = []
    read, make = torch.Tensor.tolist, torch.tensor

    def tolist(tensor):
        shapes.append(tuple(tensor.shape))
        return read(tensor)

    def tensor(*args, **kwargs):
        if kwargs.get("device", "cpu") != "cpu":
            raise RuntimeError("torch.tensor with a device waits until the values are there")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    monkeypatch.setattr(torch, "tensor", tensor)
    return shapes
