"""The end of an op waits for all its threads: small work has one, and so has all work for a while
after one came late."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastspec_kernels import available_backends

PROGRAM = """
import os
import torch
import fastspec_kernels
from tests.kernels.border_cases import CALLS

torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
for name, make in CALLS.items():
    getattr(fastspec_kernels, name)(**make(), backend="cpu")
    now = len(os.listdir("/proc/self/task"))
    assert now == before, f"{name} woke {now - before} threads"
fastspec_kernels.rms_norm(torch.randn(300, 5), torch.ones(5), 1e-5, backend="cpu")
assert len(os.listdir("/proc/self/task")) == before
weight = torch.randn(1024, 1024)
fastspec_kernels.linear(torch.randn(1, 1024), weight, backend="cpu")
assert len(os.listdir("/proc/self/task")) > before
"""


@pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_small_ops_wake_no_thread():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


COMPILER = shutil.which(os.environ.get("CXX", "c++"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_nobody_waits_for_a_thread_that_came_late(tmp_path):
    """Threads for small and for long work, whether a region was done that one came late to, the
    same again, and at last one that was not held up. Then pauses in milliseconds."""
    sources = [ROOT / "tests/kernels/late_threads.cpp", ROOT / "csrc/cpu/parallel.cpp"]
    includes = [ROOT / "csrc", Path(torch.__file__).parent / "include"]
    command = [COMPILER, "-std=c++17", "-O1", "-pthread", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, *map(str, sources), "-o", str(tmp_path / "late")], check=True)
    done = subprocess.run([tmp_path / "late"], check=True, capture_output=True, text=True)
    workers, pauses = done.stdout.splitlines()
    assert workers.split() == [*"22", "1", *"12", "1", *"22", "1", *"22"]
    assert pauses.split() == ["0", "32", "64", "0", "500"]
