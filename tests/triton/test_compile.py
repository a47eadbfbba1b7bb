"""Every kernel compiles for each GPU generation, without spills and within its budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="Triton's NVIDIA backend is not installed")

pytestmark = pytest.mark.check
PROGRAM = Path(__file__).with_name("compile_all.py")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
CAPABILITIES = (80, 90, 100, 120)
# Kernel: most registers per thread, most bytes of shared memory. The numbers hold for Triton 3.6
# and 3.7, which differ most in gather_kernel.
BUDGETS = {
    "tile_statistics_kernel": (128, 1024),
    "cut_kernel": (104, 2048),
    "gather_kernel": (224, 16384),
    "threshold_kernel": (168, 1024),
    "kept_kernel": (128, 1024),
    "row_stats_kernel": (40, 1024),
    "probs_kernel": (232, 4096),
    "sample_kernel": (128, 1024),
    "judge_kernel": (112, 1024),
    "scales_kernel": (112, 1024),
    "block_kernel": (128, 1024),
    "residual_kernel": (168, 1024),
    "draw_kernel": (168, 2048),
    "walk_kernel": (208, 2048),
    "build_tree_kernel": (40, 1024),
    "uniform_kernel": (40, 1024),
    "match_suffix_kernel": (128, 1024),
}
# All instructions of the statistics kernel over the elements of one thread, with all that is done
# once per tile; the code for two models holds their loads twice.
INSTRUCTIONS_PER_ELEMENT = {"one model": 29, "two models": 36}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.xdist_group(f"sm_{each}")) for each in CAPABILITIES
    ],
)
def compiled(request):
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS)
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(request.param)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_no_spills(compiled):
    assert [x for x in compiled if x["stack"] or x["local"]] == []


def test_registers_and_shared_memory(compiled):
    for record in compiled:
        registers, shared = BUDGETS[record["kernel"]]
        assert record["registers"] <= registers, record
        assert record["shared"] <= shared, record


def test_every_kernel_is_here(compiled):
    assert {record["kernel"] for record in compiled} == set(BUDGETS)


def test_statistics_kernel_loads_16_bytes_and_stays_cheap(compiled):
    aligned = [
        record
        for record in compiled
        if record["kernel"] == "tile_statistics_kernel" and record["wide_loads"]
    ]
    assert {record["dtype"] for record in aligned} == {"bf16", "fp32"}
    for record in aligned:
        options = record["options"]
        per_thread = options["TILE"] // (32 * options["num_warps"])
        assert record["exponentials"] == per_thread, record
        size = 2 if record["dtype"] == "bf16" else 4
        loads = per_thread * size // 16
        assert record["wide_loads"] in (loads, 2 * loads), record
        models = "one model" if record["wide_loads"] == loads else "two models"
        limit = INSTRUCTIONS_PER_ELEMENT[models] * per_thread
        assert record["instructions"] <= limit, record
