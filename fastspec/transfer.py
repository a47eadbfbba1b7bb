"""Copies from the host that nobody waits for."""

from collections.abc import Sequence

import torch
from torch import Tensor


def host_tensor(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the host, page-locked where it is bound for a GPU: only then is a copy to it
    asynchronous."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def device_tensor(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the device; the host goes on before the values are there.

    The host memory is not used again before they are, torch's allocator sees to that.
    """
    return host_tensor(values, dtype, device).to(device, non_blocking=True)
