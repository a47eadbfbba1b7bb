"""Runs the benchmark of one case: verify, time beside the others, make the record."""

from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks import cuda_timing, harness, traffic
from benchmarks.cases import Case
from benchmarks.harness import Timing
from benchmarks.workloads import Workload, build
from fastspec_kernels.backend import backends_of

NUM_SETS = 16
SETS_BYTES = 4 << 30  # of logits of all input sets together
CPU_COPY_BYTES = 64 << 20


def backends(op: str, device_type: str) -> list[str]:
    """The compiled backends that have the op on this type of device."""
    able = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}[device_type]
    return [name for name in backends_of(op, torch.device(device_type)) if name in able]


def measure(
    case: Case, backend: str, device_type: str, seconds: float = 2.0
) -> tuple[Workload, dict]:
    """The workload of one case and its record.

    Raises:
        AssertionError: the result is not the reference's; nothing is timed then.
    """
    num_sets = NUM_SETS
    if device_type == "cuda":
        num_sets = max(1, min(NUM_SETS, SETS_BYTES // max(1, case.input_bytes)))
    workload = build(case, backend, torch.device(device_type), num_sets)
    facts = workload.verify()
    num_bytes = facts.pop("floor_bytes", workload.floor_bytes)
    fields = {
        "op": case.op,
        "backend": backend,
        "shape": case.shape,
        "logits": case.logits,
        "dtype": case.dtype,
        **facts,
        "floor_bytes": num_bytes,
    }
    if device_type == "cpu":
        timings, more = _time_on_cpu(workload, seconds), {}
    else:
        timings, more = _time_on_gpu(workload, num_bytes)
    return workload, harness.record_of({**fields, **more}, timings, device_type)


def _time_on_cpu(workload: Workload, seconds: float) -> dict[str, Timing]:
    """The floor is one read: of the target's logits, in a tree of as many rows as were visited."""
    functions = {
        "ours": workload.ours,
        "floor": workload.read,
        **{name: peer.run for name, peer in workload.peers.items()},
        **{name: _cpu_copy_of(size) for name, size in traffic.pipelines(workload.case).items()},
    }
    sets = range(workload.num_sets)
    return harness.time_interleaved(
        {name: _over(function, sets) for name, function in functions.items()}, seconds
    )


def _over(function: Callable[[int], object], sets: range) -> Callable[[], object]:
    """Calls on one input set after the other."""
    order = cycle(sets)
    return lambda: function(next(order))


def _cpu_copy_of(num_bytes: int) -> Callable[[int], None]:
    """A copy that reads and writes `num_bytes` in sum."""
    source = torch.randint(256, (min(num_bytes // 2, CPU_COPY_BYTES),), dtype=torch.uint8)
    target = torch.empty_like(source)
    whole, rest = divmod(num_bytes // 2, max(1, len(source)))

    def run(_: int) -> None:
        for _ in range(whole):
            target.copy_(source)
        target[:rest].copy_(source[:rest])

    return run


def _time_on_gpu(workload: Workload, num_bytes: int) -> tuple[dict[str, Timing], dict]:
    """The floor is the bytes over the copy bandwidth measured in this process."""
    bandwidth = cuda_timing.copy_bandwidth()
    floor = round(num_bytes / bandwidth * 1e6, 6)
    working, errors = _peers_that_work(workload)
    copies = {
        name: cuda_timing.copy_of(size) for name, size in traffic.pipelines(workload.case).items()
    }
    captured = {name: run for name, (run, capturable) in working.items() if capturable}
    eager = {name: run for name, (run, capturable) in working.items() if not capturable}
    timings = cuda_timing.time_cold(
        {"ours": workload.ours, **captured, **copies}, workload.num_sets
    )
    for name, run in eager.items():
        timings[name] = cuda_timing.time_eager(run, workload.num_sets)
    timings["floor"] = Timing(floor, floor, floor)
    return timings, {
        "warm_us": cuda_timing.time_warm(workload.ours).median_us,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "gb_per_s": round(num_bytes / timings["ours"].median_us / 1e3, 1),
        "eager": sorted(eager),  # timed by the wall clock, launches included
        "peer_errors": errors,
    }


def _peers_that_work(workload: Workload) -> tuple[dict[str, tuple], dict[str, str]]:
    """The peers that run, each with whether a graph can hold it, and why the others do not."""
    working, errors = {}, {}
    for name, peer in workload.peers.items():
        try:
            peer.run(0)
            torch.cuda.synchronize()
        except Exception as error:  # whatever another package raises is noted, and ours go on
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        working[name] = (peer.run, peer.capturable and cuda_timing.can_capture(peer.run))
    return working, errors
