"""What the GPU tests share: the marks, and the backends that run on a GPU."""

import pytest
import torch

from fastspec_kernels import unavailable_backends
from fastspec_kernels.backend import backends_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
each_backend = pytest.mark.parametrize("backend", ["cuda", "triton"])


def require(backend: str, op: str) -> None:
    """Skip, with the reason, where the backend has not got the op."""
    if reason := unavailable_backends().get(backend):
        pytest.skip(f"{backend}: {reason}")
    if backend not in backends_of(op, torch.device("cuda")):
        pytest.skip(f"{backend} has no kernel of {op}")
