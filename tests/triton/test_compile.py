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
# and 3.7.
BUDGETS = {
    "tile_statistics_kernel": (128, 1024),
    "bracket_kernel": (128, 1024),
    "cut_kernel": (128, 2048),
    "gather_kernel": (128, 16384),
    "threshold_kernel": (168, 1024),
    "kept_kernel": (128, 1024),
    "row_stats_kernel": (40, 1024),
    "probs_kernel": (232, 4096),
    "sample_kernel": (128, 1024),
    "verdict_kernel": (112, 1024),
    "scales_kernel": (112, 1024),
    "block_kernel": (128, 1024),
    "residual_kernel": (168, 1024),
    "draw_kernel": (168, 2048),
    "walk_kernel": (224, 2048),
    "build_tree_kernel": (40, 1024),
    "uniform_kernel": (40, 1024),
    "match_suffix_kernel": (128, 1024),
    "race_kernel": (144, 16384),
    "winner_kernel": (40, 1024),
    "penalize_kernel": (64, 1024),
    "norm_kernel": (64, 4096),
    "heads_kernel": (40, 1024),
    "gate_kernel": (40, 0),
    "few_rows_kernel": (64, 61440),
    "gated_kernel": (64, 40960),
    "store_kernel": (40, 0),
}
# Instructions that a thread of the statistics kernel executes for each of its elements, with all
# that is done once per tile. Above 14 they would take longer than memory on an H200, and below it
# loads and instructions still take turns. Filters need a minimum besides.
EXECUTED_PER_ELEMENT = {False: 10, True: 12.5}
# And those of the residual's kernel for each pair of a target's and a draft's element.
EXECUTED_PER_PAIR = 29


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel(capability):
    """In one test, as the kernels take minutes to compile."""
    compiled = compile_all(capability)
    assert {record["kernel"] for record in compiled} == set(BUDGETS)
    for record in compiled:
        assert record["stack"] == record["local"] == 0, record
        registers, shared = BUDGETS[record["kernel"]]
        assert record["registers"] <= registers, record
        assert record["shared"] <= shared, record
    check_statistics_kernel(compiled)
    check_residual_kernel(compiled)
    check_products(compiled)


def compile_all(capability, *only):
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS)
    command = [sys.executable, str(PROGRAM), str(capability), *only]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_products(compiled):
    """Weights arrive by copies of 16 bytes, of which at least two steps are on their way."""
    for record in compiled:
        if record["kernel"] in ("few_rows_kernel", "gated_kernel"):
            assert record["in_flight"] >= 3, record  # each step is two or three copies
            assert record["narrow_copies"] == 0, record


def check_residual_kernel(compiled):
    """Where rows are aligned, it loads 16 bytes at a time, and masses are of groups."""
    aligned = [
        record
        for record in compiled
        if record["kernel"] == "residual_kernel" and record["wide_loads"]
    ]
    assert aligned
    for record in aligned:
        per_thread = record["options"]["TILE"] // (32 * record["options"]["num_warps"])
        assert record["wide_loads"] == 2 * per_thread * 2 // 16, record
        assert record["executed"] <= EXECUTED_PER_PAIR * per_thread, record


def check_statistics_kernel(compiled):
    """It loads 16 bytes at a time and stays cheap."""
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
        # With and without masks, by each of two models if the compiler does not merge their loads.
        assert record["wide_loads"] in (2 * loads, 4 * loads), record
        assert record["executed"] <= EXECUTED_PER_ELEMENT[record["filtered"]] * per_thread, record
