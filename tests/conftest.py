"""Makes the tests run in a bare checkout, each from the same random seed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if find_spec("fastspec_kernels") is None:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
