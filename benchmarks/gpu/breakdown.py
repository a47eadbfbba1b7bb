"""Which kernels an op's time goes to, inputs out of the cache: the base cases of each op."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import cuda_timing, harness, measuring, workloads
from benchmarks.cases import OPS, Case, cases
from benchmarks.gpu import options
from benchmarks.gpu.bench import Progress
from benchmarks.gpu.steps import UNFINISHED
from fastspec.tools.bench import describe_environment

SLOWEST_CASE = 6.0  # seconds
NUM_SETS, CALLS = 4, 16
WIDEST_NAME = 60


def plan() -> Iterator[tuple[Case, str]]:
    """The base of each op, with and without filters, for one sequence and for many."""
    for op in OPS:
        for case in cases(op, "cuda"):
            steps_off = (case.batch == 1) + (case.sampling != "unfiltered")
            if case.rank == steps_off <= 1:
                for backend in measuring.backends(op, "cuda"):
                    yield case, backend


def kernels_of(call: Callable[[int], object], device: str) -> dict[str, float]:
    """Microseconds of a call by kernel, longest first; what empties the cache is left out."""
    for i in range(NUM_SETS):
        call(i)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    if device == "cuda":
        torch.cuda.synchronize()
    with profile(activities=[activity], acc_events=True) as profiler:
        for i in range(CALLS):
            if device == "cuda":
                cuda_timing.flush()
            call(i % NUM_SETS)
        if device == "cuda":
            torch.cuda.synchronize()
    field = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    times = {event.key: getattr(event, field) / CALLS for event in profiler.key_averages()}
    kept = {name: time for name, time in times.items() if time > 0 and "reduce_kernel" not in name}
    longest = sorted(kept.items(), key=lambda item: -item[1])
    return {name[:WIDEST_NAME]: round(time, 2) for name, time in longest}


def measure(case: Case, backend: str, device: str, folder: Path) -> dict[str, float]:
    workload = workloads.build(case, backend, torch.device(device), NUM_SETS)
    found = kernels_of(workload.ours, device)
    identity = {"op": case.op, "backend": backend, "shape": case.shape, "dtype": case.dtype}
    where = {**describe_environment(), **harness.describe_device(device)}
    harness.append("breakdown", {**identity, "logits": case.logits, "us": found, **where}, folder)
    return found


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    todo = list(plan())
    if arguments.dry_run:
        todo = [(Case("sample", 1000, 1, "zipf", "float32"), "reference")]
    named = {f"{case.name}-{backend}": (case, backend) for case, backend in todo}
    progress = Progress(arguments.out / "breakdown.progress")
    for name in progress.in_turn(named, lambda: options.seconds_left(arguments) >= SLOWEST_CASE):
        found = measure(*named[name], device, arguments.out)
        progress.note(name, "done")
        kernels = ", ".join(f"{kernel} {time}" for kernel, time in found.items())
        print(f"{name}: {kernels}", flush=True)
    print(f"{len(progress.status)} of {len(named)} cases", flush=True)
    return UNFINISHED if len(progress.status) < len(named) else 0


if __name__ == "__main__":
    sys.exit(main())
