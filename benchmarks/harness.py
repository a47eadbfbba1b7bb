"""Timing and records of the benchmarks: interleaved measurements, one JSON line per result."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fastspec.tools.bench import describe_environment

RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS = 20


@dataclass(frozen=True)
class Timing:
    """Quantiles of one function's time."""

    median_us: float
    p20_us: float
    p80_us: float


def time_interleaved(functions: dict[str, Callable], seconds: float = 2.0) -> dict[str, Timing]:
    """Call the functions in turn, so that all of them meet the same state of the machine.

    Each round calls every function twice and times the second call, whose inputs are in the cache
    as far as they fit; every other round goes backwards, as what ran just before leaves its mark on
    caches and memory. Rounds go on for `seconds`, at least MIN_ROUNDS.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < MIN_ROUNDS:
        for name, function in order:
            function()
            start = time.perf_counter()
            function()
            samples[name].append((time.perf_counter() - start) * 1e6)
        order.reverse()
    return {name: quantiles(values) for name, values in samples.items()}


def quantiles(samples: list[float]) -> Timing:
    points = torch.tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    )
    return Timing(*(round(value, 2) for value in points.tolist()))


def record_of(fields: dict, timings: dict[str, Timing], device_type: str = "cpu") -> dict:
    """One result: what was timed, how long it took, how it compares with the others, and where."""
    ours = timings["ours"]
    ratios = {
        f"ratio_to_{name}": round(ours.median_us / timing.median_us, 4)
        for name, timing in timings.items()
        if name != "ours"
    }
    # On a GPU the arguments say where results go, on a machine that will be gone.
    argv = {} if device_type == "cuda" else {"argv": sys.argv[1:]}
    others = {f"{name}_us": timing.median_us for name, timing in timings.items() if name != "ours"}
    return {
        **fields,
        **asdict(ours),
        **others,
        **ratios,
        "verified": True,
        **describe_environment(),
        **describe_device(device_type),
        "load": round(os.getloadavg()[0], 1),  # above the number of cores, timings are noise
        **argv,
    }


def describe_device(device_type: str) -> dict:
    """The device that the numbers are of."""
    if device_type == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "cuda": torch.version.cuda,
        "l2_mib": properties.L2_cache_size >> 20,
        "triton": version_of("triton"),
        "flashinfer": version_of("flashinfer-python"),
    }


def version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def append(name: str, record: dict, folder: Path | None = None) -> None:
    """Add one line to NAME.jsonl in benchmarks/results or another folder."""
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    append_to(folder / f"{name}.jsonl", record)


def append_to(path: Path, record: dict) -> None:
    """Add one line to a file of records."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
