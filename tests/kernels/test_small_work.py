"""Ops whose work does not pay for a second thread run in one: its end would wait for the other."""

import subprocess
import sys

import pytest

from fastspec_kernels import available_backends

PROGRAM = """
import os
import torch
import fastspec_kernels
from tests.kernels.test_border import CALLS

torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
for name, make in CALLS.items():
    getattr(fastspec_kernels, name)(**make(), backend="cpu")
    now = len(os.listdir("/proc/self/task"))
    assert now == before, f"{name} woke {now - before} threads"
weight = torch.randn(1024, 1024)
fastspec_kernels.linear(torch.randn(1, 1024), weight, backend="cpu")
assert len(os.listdir("/proc/self/task")) > before
"""


@pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_small_ops_wake_no_thread():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
