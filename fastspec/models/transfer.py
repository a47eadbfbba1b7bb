"""Asynchronous copies from the host.

A round of the engine uploads the layout of each forward pass, or of all steps of a draft that are
one graph, in two buffers, the last committed tokens, and for the kernels the seeds, positions and
sampling parameters of its requests. It waits for the device once, when `verify` reads back what was
accepted, and once more if a request wants log-probabilities.
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
    if device.type != "cpu":
        return host_tensor(values, dtype, device).to(device, non_blocking=True)
    if dtype in _INTEGERS:  # numpy converts lists several times as fast as torch
        return torch.from_numpy(np.array(values, dtype=_INTEGERS[dtype], order="C"))
    return torch.tensor(values, dtype=dtype)


def host_tensor(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor on the host, page-locked if it is bound for a GPU, as only such copies are
    asynchronous."""
    tensor = device_tensor(values, dtype, torch.device("cpu"))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def padded_tensor(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return [len(rows), width] int32 on the device, -1 after the end of each row."""
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return device_tensor(padded, torch.int32, device).view(len(rows), width)
