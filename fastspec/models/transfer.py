"""Copies from the host that nobody waits for.

A round of the engine uploads the layout of each forward pass in two buffers, the tokens that were
committed last, and for the kernels the seeds, positions and sampling parameters of its requests. It
waits for the device once, where `verify` reads back what was accepted, and once more where a
request wants log-probabilities.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def host_tensor(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the host, page-locked where it is bound for a GPU: only then is a copy to it
    asynchronous."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def device_tensor(
    values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor on the device; the host goes on before the values are there.

    The host memory is not used again before they are, torch's allocator sees to that.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return host_tensor(values, dtype, device).to(device, non_blocking=True)


def padded_tensor(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """[len(rows), width] int32 on the device, -1 after the end of each row."""
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return device_tensor(padded, torch.int32, device).view(len(rows), width)
