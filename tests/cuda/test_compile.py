"""What nvcc makes of csrc/cuda: no spills, few registers, wide loads, short loops; needs no GPU."""

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from fcntl import LOCK_EX, flock
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from .sass import inner_loops, longest_round

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda_guard"
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
ARCHS = ("80", "90", "100", "120")
FLAGS = ["-cubin", "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", "-Xptxas=-v"]

# Registers that a thread may use: 65536 / (registers * threads) blocks run on a multiprocessor at
# once. All shared memory is asked for at the launch (csrc/cuda/plan.h), none is static.
REGISTERS = {
    "uniform_kernel": 40,  # 256 threads
    "build_tree_kernel": 40,  # 128
    "store_kv_kernel": 80,  # 256
    "compact_kv_kernel": 80,  # 128
    "penalize_kernel": 80,  # 128
    "verify_tree_kernel": 128,  # 512
}
# Instructions per logit; at the bandwidth of an H200 there is time for about 31 of them with 32-bit
# logits and 15 with 16-bit ones.
SUM_STAGED = 15.5  # whatever the type of the logits is: known only when the kernel runs


def find_nvcc() -> Path | None:
    path = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return path if path.exists() else None


def find_nvdisasm() -> str | None:
    """Of the toolkit, else the one that triton brings."""
    folders = [find_nvcc().parent] if find_nvcc() else []
    spec = find_spec("triton")
    if spec and spec.origin:
        folders.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    return shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))


pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(
        find_nvcc() is None,
        reason="no nvcc in CUDA_HOME (or, where that is not set, /usr/local/cuda)",
    ),
]
needs_nvdisasm = pytest.mark.skipif(
    find_nvdisasm() is None, reason="no nvdisasm in the CUDA toolkit or in triton"
)


@cache
def compiled(archs: tuple[str, ...] = ARCHS) -> dict[tuple[str, str], tuple[Path, str]]:
    """Cubin and ptxas report of each source for each architecture, from build/ if unchanged."""
    BUILD.mkdir(parents=True, exist_ok=True)
    headers = sorted((ROOT / "csrc").rglob("*.*h"))
    common = b"".join(path.read_bytes() for path in headers) + repr(FLAGS).encode()
    jobs = [(source, arch, common) for source in SOURCES for arch in archs]
    with (BUILD / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        flock(lock, LOCK_EX)  # other workers wait, then find everything there
        results = list(pool.map(lambda job: compile_one(*job), jobs))
    return {
        (source.stem, arch): result for (source, arch, _), result in zip(jobs, results, strict=True)
    }


def compile_one(source: Path, arch: str, common: bytes) -> tuple[Path, str]:
    digest = hashlib.sha256(common + source.read_bytes()).hexdigest()[:16]
    cubin = BUILD / f"{source.stem}_{arch}_{digest}.cubin"
    report = cubin.with_suffix(".txt")
    if not (cubin.exists() and report.exists()):
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = [find_nvcc(), *FLAGS, code, source, "-o", cubin]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        report.write_text(run.stderr)
    return cubin, report.read_text()


def kernels_of(report: str) -> dict[str, str]:
    """What ptxas says of each kernel, by mangled name."""
    parts = re.split(r"Compiling entry function '(\S+)'", report)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def disassembly(stem: str, arch: str) -> dict[str, list[str]]:
    """The instructions and labels of each kernel, by mangled name."""
    cubin, _ = compiled((arch,))[stem, arch]
    command = [find_nvdisasm(), "-c", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\n\.text\.(\w+):\n", text)
    return {
        name: [line.strip() for line in body.splitlines() if line.strip()]
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }


def short_name(mangled: str) -> str:
    return next(name for name in REGISTERS if name in mangled)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_spills_and_few_registers(source, arch):
    _, report = compiled()[source.stem, arch]
    kernels = kernels_of(report)
    assert kernels
    for mangled, text in kernels.items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, mangled
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        assert registers <= REGISTERS[short_name(mangled)], mangled
        assert not re.search(r"\d+ bytes smem", text), mangled


def test_every_kernel_has_its_limits():
    names = {
        short_name(mangled)
        for source in SOURCES
        for mangled in kernels_of(compiled()[source.stem, "90"][1])
    }
    assert names == set(REGISTERS)


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_of_staged_rows_take_few_instructions(arch):
    """The loop that adds the weights of eight logits in a round, as it is shipped."""
    [lines] = [
        body
        for name, body in disassembly("verify_tree", arch).items()
        if "verify_tree_kernelILb1E" in name
    ]
    sums = [loop for loop in inner_loops(lines) if is_sum("\n".join(loop))]
    assert sums
    assert all(0 < longest_round(loop) / 8 <= SUM_STAGED for loop in sums)


def is_sum(loop: str) -> bool:
    """Whether a loop adds eight weights from shared memory, and does nothing else with them."""
    others = re.search(r"ATOMS|MNMX|SHFL|VOTE|STG", loop)
    return loop.count("MUFU.EX2") == 8 == loop.count("F2I.U64") and "LDS.128" in loop and not others


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_are_shared_by_clusters_where_there_are_any(arch):
    """The barrier of a cluster, and whole words read from the shared memory of another block."""
    for mangled, lines in disassembly("verify_tree", arch).items():
        text = "\n".join(lines)
        for instruction in ("UCGABAR_ARV", "UCGABAR_WAIT", " LD.E.64"):
            assert (instruction in text) == (arch != "80"), (mangled, instruction)
        assert " LD.E.U8" not in text
        # Thresholds are found with additions that shared memory makes by itself, not in a loop.
        assert "ATOMS.ADD" in text
        assert not re.search(r"ATOMS\.CAS", text), mangled
        assert "LDG.E.128" in text
        assert "LDL" not in text


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("source", "unit", "count"), [("store_kv", "Eight", 2), ("compact_kv", "5uint4", 8)]
)
def test_entries_of_the_cache_move_by_16_bytes(source, unit, count, arch):
    """All that a thread loads in one round is on its way before it stores the first of it."""
    [lines] = [body for name, body in disassembly(source, arch).items() if unit in name]
    moves = [match[0] for line in lines if (match := re.search(r"\b(LD|ST)G?\.E\.128", line))]
    loads = ["LD" in move for move in moves]
    assert loads.count(True) >= count
    assert loads.count(False) >= count
    assert all(loads[:count])
    assert not any(re.search(r"\b(LDL|STL)\b", line) for line in lines)
