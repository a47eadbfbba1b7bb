"""The CUDA kernel of uniform, run thread by thread on the CPU."""

import pytest
import torch

from fastspec_kernels import reference

from . import emulated
from .emulated import Emulation

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")


@pytest.mark.parametrize("num", [0, 1, 7, 300])
def test_uniform(num):
    generator = torch.Generator().manual_seed(num)
    seed, position = torch.randint(-(2**62), 2**62, (2, 5), generator=generator)
    expected = reference.uniform(seed, position, num, 3)
    assert Emulation(order=1).uniform(seed, position, num, 3).equal(expected)
