"""The engine's thread has the cores for itself."""

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import os, time
import torch
from fastspec.serve.engine_thread import _end_openmp_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
before = threads()
torch.randn(3000, 3000).amax()
helped = threads()
_end_openmp_threads()
for _ in range(100):
    if threads() < helped:
        break
    time.sleep(0.05)
print(helped - before, helped - threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_that_helped_to_load_are_ended():
    run = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    started, ended = map(int, run.stdout.split())
    if not started:
        pytest.skip("torch calculates without OpenMP here")
    assert ended == started
