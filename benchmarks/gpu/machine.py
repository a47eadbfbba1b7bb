"""Measures the machine: bandwidths, matrix rate, latencies of launches and graph replays."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import cuda_timing, harness
from benchmarks.gpu import options
from benchmarks.harness import Timing

GIB = 1 << 30
NUM_DEPENDENT = 101


@dataclass(frozen=True)
class Result:
    """One property: the time of one repetition, and the amount it moved or computed in it."""

    what: str
    timing: Timing
    amount: float = 0.0
    unit: str = ""

    def fields(self) -> dict:
        fields = {"op": "machine", "backend": "torch", "shape": {}, "dtype": "", "what": self.what}
        if self.unit:
            rate = self.amount / self.timing.median_us * 1e6
            return {**fields, "value": round(rate, 3), "unit": self.unit}
        return {**fields, "value": self.timing.median_us, "unit": "us"}


def measure_gpu() -> Iterator[Result]:
    def cold(function) -> Timing:
        return cuda_timing.time_cold({"ours": lambda i: function()}, num_sets=1)["ours"]

    source = torch.randn(GIB, device="cuda")  # 4 GiB
    copy = cuda_timing.time_cold({"ours": cuda_timing.copy_of(4 * GIB)}, num_sets=1)["ours"]
    yield Result("copy", copy, 4 * GIB / 1e9, "GB/s")
    yield Result("read", cold(partial(source.amax)), 4 * GIB / 1e9, "GB/s")
    small = source[: torch.cuda.get_device_properties(0).L2_cache_size // 4 // 4]
    warm = cuda_timing.time_warm(lambda i: small.amax())
    yield Result("read of a quarter of the L2, warm", warm, small.nbytes / 1e9, "GB/s")
    del source

    size = 8192
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    yield Result("bf16 matmul 8192", cold(lambda: left @ right), 2 * size**3 / 1e12, "TFLOP/s")

    one = torch.zeros(1, device="cuda")
    for num in (1, 2, NUM_DEPENDENT):
        replay = cuda_timing.capture(lambda i: one.add_(1), range(num))
        timing = cuda_timing.time_replays({"ours": (replay, 1)}, before=cuda_timing.spin)["ours"]
        name = "graph replay of 1 kernel" if num == 1 else f"of {num} dependent kernels"
        yield Result(name, timing)
    yield Result("eager launch, wall clock", _eager_launches(one))
    yield Result("eager launch and wait, wall clock", cuda_timing.time_eager(one.add_, 1))


def _eager_launches(one: torch.Tensor) -> Timing:
    """Time to queue one trivial kernel from Python."""
    samples = harness.time_interleaved({"ours": lambda: one.add_(1)}, seconds=0.2)
    torch.cuda.synchronize()
    return samples["ours"]


def measure_cpu() -> Iterator[Result]:
    """The same kinds of numbers on a CPU, small: for dry runs."""

    def time(function) -> Timing:
        return harness.time_interleaved({"ours": function}, seconds=0)["ours"]

    source = torch.randn(1 << 20)
    yield Result("copy", time(source.clone), 2 * source.nbytes / 1e9, "GB/s")
    yield Result("read", time(source.amax), source.nbytes / 1e9, "GB/s")
    left, right = torch.randn(2, 256, 256)
    yield Result("float32 matmul 256", time(lambda: left @ right), 2 * 256**3 / 1e12, "TFLOP/s")
    one = torch.zeros(1)
    yield Result("eager launch, wall clock", time(lambda: one.add_(1)))


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    device_type = "cpu" if arguments.dry_run else "cuda"
    results = measure_cpu() if arguments.dry_run else measure_gpu()
    for result in results:
        fields = result.fields()
        record = harness.record_of(fields, {"ours": result.timing}, device_type)
        harness.append("machine", record, arguments.out)
        print(f"{fields['what']}: {fields['value']} {fields['unit']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
