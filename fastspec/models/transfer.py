"""Asynchronous copies from the host.

A round of the engine uploads the layout of each forward pass in two buffers, or that of a CUDA
graph in one, the last committed tokens, and for the kernels the seeds, positions and sampling
parameters of its requests. It waits for the device when `verify` reads back what was accepted; the
docstring of `fastspec.engine.verify.verify` says how many copies that takes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {torch.int64: np.int64, torch.int32: np.int32}


def device_tensor(
    values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a tensor on the device without waiting for the copy.

    torch's allocator does not reuse the host memory before the copy is done.
    """
    if dtype in _INTEGERS:  # numpy converts lists several times as fast as torch
        tensor = torch.from_numpy(np.array(values, dtype=_INTEGERS[dtype], order="C"))
    else:
        tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":  # only copies of page-locked memory are asynchronous
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class StaticIntegers:
    """Integers that a CUDA graph reads at fixed addresses, and that one copy replaces.

    Attributes:
        wide, narrow: the int64 and int32 ones; 0 at first.
    """

    def __init__(self, num_wide: int, num_narrow: int, device: torch.device):
        self._num_wide, self._place = num_wide, 8 * (num_wide + num_wide % 2)  # kernels want 16
        size = self._place + 4 * num_narrow
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.wide, self.narrow = self._parts(self._bytes)
        self._on_host: Tensor | None = None
        self._is_copied = torch.cuda.Event() if device.type == "cuda" else None

    def replace(self, wide: list[int], narrow: list[int]) -> None:
        """Replace all of them, without waiting for the copy or an earlier one."""
        # Nobody's until its copy is recorded, so that an interrupt cannot leave it in use.
        on_host, self._on_host = self._on_host, None
        event, device = self._is_copied, self._bytes.device
        if on_host is None or not (event is None or event.query()):
            on_host = torch.empty_like(self._bytes, device="cpu", pin_memory=event is not None)
        for part, values in zip(self._parts(on_host), (wide, narrow), strict=True):
            part.numpy()[:] = values
        self._bytes.copy_(on_host, non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(device))
        self._on_host = on_host

    def _parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        wide, narrow = both[: 8 * self._num_wide], both[self._place :]
        return wide.view(torch.int64), narrow.view(torch.int32)


def padded_tensor(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return [len(rows), width] int32 on the device, -1 after the end of each row."""
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return device_tensor(padded, torch.int32, device).view(len(rows), width)
