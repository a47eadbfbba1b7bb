"""Selects the implementation of an op: explicit requests must be met, the default may degrade."""

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastspec_kernels import library, reference
from fastspec_kernels.checks import FLOAT8, check_choice

logger = logging.getLogger(__name__)

BACKENDS = ("cpu", "cuda", "triton", "reference")
# The ops that fastspec_kernels.triton exports.
TRITON_OPS = frozenset(
    {
        "build_tree",
        "compact_kv",
        "cross_attention",
        "decoder_layers",
        "logits_to_probs",
        "match_suffix",
        "penalize",
        "row_stats",
        "sample",
        "sample_coupled",
        "store_kv",
        "tree_attention",
        "uniform",
        "verify_chain",
        "verify_tree",
    }
)
# Ops that compute with the contents of a cache; their compiled kernels do not support float8.
_CACHE_OPS = frozenset(
    {"cross_attention", "decoder_layers", "draft_chain", "store_kv", "tree_attention"}
)
# Both are read once, because ops run thousands of times per second.
_DEFAULT = os.environ.get("FASTSPEC_BACKEND", "auto")
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
check_choice("FASTSPEC_BACKEND", _DEFAULT, ("auto", *BACKENDS))


def run_checked(
    op: str, requested: str, tensor: Tensor, arguments: tuple, check: Callable[[], None]
) -> Any:
    """Run `op` on the device and dtype of `tensor`; `check` raises for invalid arguments.

    Compiled kernels check arguments themselves, in a fraction of the time; only if one refuses does
    `check` run, to say which argument is wrong. Ops that "auto" leaves to the reference are logged
    once.
    """
    try:
        other = _other_backend(op, requested, tensor.device, tensor.dtype)
        if other is None:
            out = library.OVERLOADS[op](*arguments)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        check()
        resolve(op, requested, tensor.device, tensor.dtype)  # a list as `backend`, say
        raise
    if other is not None:
        check()
        run = getattr(reference if other == "reference" else _triton_kernels(), op)
        with torch.no_grad():  # no kernel is differentiable, and a cache may be a leaf
            out = run(*arguments)
    for place in library.WRITTEN[op]:  # only torch's own ops tell autograd by themselves
        if (written := arguments[place]) is not None:
            increment_version(written)
    return out


@torch.compiler.assume_constant_result
def _other_backend(op: str, requested: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the backend that runs the op if it is not the compiled kernel of the device."""
    return _resolved_once(op, requested, device, dtype)


@cache
def _resolved_once(op: str, requested: str, device: torch.device, dtype: torch.dtype) -> str | None:
    name = resolve(op, requested, device, dtype)
    if name == "reference" and (requested, _DEFAULT) == ("auto", "auto"):
        _say_once(f"no kernel of {op} for a {_described(device, dtype)}; the slow reference runs")
    return None if name == device.type else name


def resolve(op: str, requested: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """Return the backend that runs `op` on `device`, for a cache of this dtype if it has one.

    "auto" is FASTSPEC_BACKEND if it was set at import, otherwise the compiled kernel of the device
    if there is one, otherwise Triton on a GPU, otherwise the reference. A GPU that the CUDA
    extension was not built for is logged once.

    Raises:
        ValueError: the name is unknown, or that backend has no kernel of this op for this device
            or dtype.
    """
    if requested == "auto":
        requested = _DEFAULT
    if requested == "auto":
        if _is_compiled(op, device, dtype):
            return device.type
        if device.type == "cuda" and _lacks_image(op, device):
            _say_once(f"{_no_image(device)}; its tensors go to Triton or the reference")
        return "triton" if device.type == "cuda" and _runs_in_triton(op, "cuda") else "reference"
    if requested == device.type and _is_compiled(op, device, dtype):
        return requested
    if requested not in BACKENDS:
        raise ValueError(f"backend: expected 'auto' or one of {BACKENDS}, got {requested!r}")
    available = backends_of(op, device, dtype)
    if requested not in available:
        lacks = requested == "cuda" == device.type and _lacks_image(op, device)
        raise ValueError(
            f"backend: {requested!r} cannot run {op} on a {_described(device, dtype)}"
            f"{': ' + _no_image(device) if lacks else ''}; available: {', '.join(available)}"
        )
    return requested


def backend_of(op: str, device: torch.device | str, backend: str = "auto") -> str | None:
    """Return the backend that an op uses for tensors on a device if `backend` is requested.

    "auto" is as in the ops. None if that backend has no kernel of the op for the device.

    Raises:
        ValueError: there is no such op, device or backend.
    """
    check_choice("op", op, tuple(reference.__all__))
    check_choice("backend", backend, ("auto", *BACKENDS))
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected a device of torch, got {device!r:.80}") from error
    try:
        return resolve(op, backend, known)
    except ValueError:
        return None


def backends_of(op: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Return the backends that can run `op` on tensors of `device`, best first."""
    compiled = (device.type,) if _is_compiled(op, device, dtype) else ()
    triton = ("triton",) if _runs_in_triton(op, device.type) else ()
    return (*compiled, *triton, "reference")


def available_backends() -> tuple[str, ...]:
    """Return the backends that can run in this process; the reference is always included."""
    reasons = unavailable_backends()
    return tuple(name for name in ("cuda", "triton", "cpu", "reference") if name not in reasons)


def unavailable_backends() -> dict[str, str]:
    """Return why each backend that is missing from `available_backends` cannot run.

    Whether the CUDA extension has code for the current GPU is only checked once the process uses
    the GPU, because the check would initialise it.
    """
    reasons = {}
    if not library.HAS_CPU_EXTENSION:
        reasons["cpu"] = "the extension fastspec_kernels._cpu is not built"
    if not torch.cuda.is_available():
        reasons["cuda"] = "torch sees no CUDA device"
    elif not library.HAS_CUDA_EXTENSION:
        reasons["cuda"] = "the extension fastspec_kernels._cuda is not built"
    elif torch.cuda.is_initialized() and not library.has_image(torch.cuda.current_device()):
        reasons["cuda"] = _no_image(torch.device("cuda", torch.cuda.current_device()))
    if find_spec("triton") is None:
        reasons["triton"] = "triton is not installed"
    elif not (torch.cuda.is_available() or _TRITON_INTERPRETS):
        reasons["triton"] = (
            "torch sees no CUDA device; TRITON_INTERPRET=1 in the environment runs the kernels on"
            " the CPU, slowly, for tests"
        )
    return reasons


def cpu_instruction_set() -> str | None:
    """Return the instruction set that the CPU kernels use; None if they are not built."""
    return torch.ops.fastspec.cpu_instruction_set() if library.HAS_CPU_EXTENSION else None


def _is_compiled(op: str, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether the device has a compiled kernel for a cache of this dtype."""
    takes = dtype != FLOAT8 or op not in _CACHE_OPS
    runs = device.type != "cuda" or not _lacks_image(op, device)
    return takes and runs and library.has_kernel(op, device.type)


def _described(device: torch.device, dtype: torch.dtype | None) -> str:
    return f"{device.type} tensor" + (" of float8_e4m3fn" if dtype == FLOAT8 else "")


def _lacks_image(op: str, device: torch.device) -> bool:
    """Whether the CUDA extension has a kernel of this op, but no code for this GPU."""
    if not library.has_kernel(op, "cuda"):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return not library.has_image(index)


def _no_image(device: torch.device) -> str:
    """Return why the CUDA extension cannot run on a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.ops.fastspec.cuda_architectures()
    return f"_cuda was built for {built}, but {device} has compute capability {major}.{minor}"


@cache
def _say_once(reason: str) -> None:
    logger.warning("backend: %s", reason)


@cache
def _runs_in_triton(op: str, device_type: str) -> bool:
    """Whether Triton runs the op: compiled kernels need a GPU, interpreted ones CPU tensors."""
    runs_on = "cpu" if _TRITON_INTERPRETS else "cuda"
    return op in TRITON_OPS and device_type == runs_on and "triton" not in unavailable_backends()


@cache
def _triton_kernels():
    """Import Triton kernels on first use, because importing triton is slow."""
    return import_module("fastspec_kernels.triton")
