"""What the compiler makes of the attention and cache kernels for four GPUs that may be absent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
# Bytes of shared memory that a program may have. A processor has 1 KiB more, and keeps 1 KiB for
# each of its programs.
SHARED = {80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10, 120: 99 * 2**10}
LARGE_TILES = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


def compile_all(capability: int) -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'kernels'}{os.pathsep}{ROOT}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.triton.compile_attention", str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.check
@pytest.mark.parametrize("capability", LARGE_TILES)
def test_instructions(capability):
    """Tensor cores and 16-byte loads are used; registers and shared memory suffice.

    On an H200, large tiles of 4 warps that spill beat those of 8 that do not. Few rows of sequences
    that may be shared spill a few numbers.
    """
    lines = compile_all(capability)
    assert len(lines) == 29
    for line in lines:
        kind, _, shape = line["name"].partition(" ")
        is_large = (
            shape.startswith(("q16", "q64", "q128")) and " d256 " not in shape and kind != "tree+"
        )
        # The widest heads in float32 compile and fit, but no more.
        may_spill = is_large or shape == "q1 d256 b64 fp32"
        is_split = " d128 b1 " in shape
        assert line["spills"] <= (272 if may_spill else 12 if is_split else 0), line
        assert line["shared"] <= SHARED[capability], line
        assert line["loads16"] > 0, line
        assert all(line["pairs"]), line
        if kind.rstrip("8+") not in ("chain", "tree", "cross"):
            continue
        assert bool(line["pairs"]) == (" b1 " in shape), line
        # Keys and values of the next step are on their way while those of one are multiplied.
        assert line["in_flight"] >= 2, line
        assert line[LARGE_TILES[capability] if is_large else "mma"] > 0, line
        two = [("chain", "q1 d64 b64 bf16"), ("chain", "q1 d128 b1 bf16")]
        if capability in (90, 100):
            two += [("tree", "q16 d128 b1 bf16"), ("tree", "q16 d128 b64 bf16")]
        if (kind, shape) in two:
            # Two programs fit on a multiprocessor of a data centre's GPU.
            assert 2 * 128 * line["registers"] <= 2**16, line
            assert capability == 120 or 2 * line["shared"] <= SHARED[capability] - 2**10, line
        is_read = kind.endswith("8") and capability >= 89
        assert line["float8"] == (["e4m3x2"] if is_read else []), line
