"""What the compiler makes of the attention and cache kernels for four GPUs that may be absent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_attention.py")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SHARED = 101_376  # bytes: all of sm_120, and two programs fit on a processor of sm_90
LARGE_TILES = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


@pytest.mark.check
@pytest.mark.parametrize("capability", LARGE_TILES)
def test_instructions(capability):
    """Tensor cores and 16-byte loads are used; registers and shared memory suffice: no spills."""
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 40
    for line in lines:
        kind, _, shape = line["name"].partition(" ")
        assert line["spills"] == 0, line
        assert line["shared"] <= SHARED, line
        assert line["loads16"] > 0, line
        if kind.rstrip("8w+") in ("chain", "tree", "cross"):
            is_few = shape.startswith(("q1 ", "q8 "))
            unit = "mma" if is_few else LARGE_TILES[capability]
            assert line[unit] > 0, line
