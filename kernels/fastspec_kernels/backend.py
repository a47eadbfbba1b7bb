"""Which implementation of an op runs: an explicit request must be met, the default may degrade."""

import os

import torch

from fastspec_kernels import library

BACKENDS = ("cpu", "cuda", "triton", "reference")
_TRITON_OPS: frozenset[str] = frozenset()
_DEFAULT = os.environ.get(
    "FASTSPEC_BACKEND", "auto"
)  # read once: ops run thousands of times a second


def resolve(op: str, requested: str, device: torch.device) -> str:
    """Name the backend that runs `op` on `device`.

    "auto" takes FASTSPEC_BACKEND if it was set at import, else the compiled kernel of the device,
    else the reference.

    Raises:
        ValueError: the name is unknown, or that backend has no kernel of this op for this device.
    """
    if requested == "auto":
        requested = _DEFAULT
    if requested == "auto":
        return device.type if library.has_kernel(op, device.type) else "reference"
    if requested == device.type and library.has_kernel(op, requested):
        return requested
    if requested not in BACKENDS:
        raise ValueError(f"backend: expected 'auto' or one of {BACKENDS}, got {requested!r}")
    if requested not in _backends_of(op, device):
        available = ", ".join(_backends_of(op, device))
        raise ValueError(
            f"backend: {requested!r} cannot run {op} on a {device.type} tensor;"
            f" available: {available}"
        )
    return requested


def available_backends() -> tuple[str, ...]:
    """The backends that can run in this process, best first; the reference is always there."""
    reasons = unavailable_backends()
    return tuple(name for name in ("cuda", "triton", "cpu", "reference") if name not in reasons)


def unavailable_backends() -> dict[str, str]:
    """Why each backend that is missing from `available_backends` cannot run."""
    reasons = {}
    if not library.HAS_CPU_EXTENSION:
        reasons["cpu"] = "the extension fastspec_kernels._cpu is not built"
    if not torch.cuda.is_available():
        reasons["cuda"] = "torch sees no CUDA device"
    elif not library.HAS_CUDA_EXTENSION:
        reasons["cuda"] = "the extension fastspec_kernels._cuda is not built"
    if not _TRITON_OPS:
        reasons["triton"] = "this version has no Triton kernels"
    return reasons


def cpu_instruction_set() -> str | None:
    """The vector instructions that the CPU kernels use here; None when they are not built."""
    return torch.ops.fastspec.cpu_instruction_set() if library.HAS_CPU_EXTENSION else None


def _backends_of(op: str, device: torch.device) -> tuple[str, ...]:
    compiled = (device.type,) if library.has_kernel(op, device.type) else ()
    return (*compiled, "reference")
