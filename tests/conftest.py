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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
