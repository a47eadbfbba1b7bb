"""Makes the tests run in a bare checkout and, Triton's too, without a GPU; seeds each test."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if find_spec("fastspec_kernels") is None:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
if not torch.cuda.is_available():
    # Before any kernel is defined: it decides how triton.jit understands them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    # Together the workers, and what they start, should not ask for more threads than there are.
    threads = max(1, (os.cpu_count() or 1) // WORKERS)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

# Files that take longest; started first, so that no worker waits for the other at the end.
LONG_FILES = (
    "tests/test_packaging.py",
    "tests/triton/test_compile_attention.py",
    "tests/triton/test_compile.py",
    "tests/cuda/test_compile.py",
    "tests/triton/test_attention.py",
)


def pytest_collection_modifyitems(items):
    """Long files first; the order is otherwise as it was."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
