"""The one place that launches kernels."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, grid: int | tuple[int, ...], *args: Any, num_warps: int, **constants: Any
) -> None:
    """Run a grid of programs of a kernel on the device of its tensors; skip an empty grid."""
    grid = (grid,) if isinstance(grid, int) else grid
    if 0 in grid:
        return
    # Fused multiply-adds are requested explicitly where wanted, so equal code gives equal bits.
    options = {"num_warps": num_warps, "enable_fp_fusion": False, **constants}
    device = _device_of(args)
    if "PDL" in kernel.arg_names:
        options["PDL"] = _may_overlap(device)
        if options["PDL"]:
            options["launch_pdl"] = True
    if device.type == "cuda":
        with torch.cuda.device(device):  # Triton launches on the current device
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@cache
def _may_overlap(device: torch.device) -> bool:
    """Whether a GPU can begin a launch before the one before has ended: NVIDIA's from Hopper on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _device_of(args: tuple) -> torch.device:
    """Return the device of the first tensor among arguments and groups of arguments."""
    groups = list(args)
    for arg in groups:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, tuple):
            groups.extend(arg)
    raise ValueError("a launch needs a tensor")
