"""Times on a GPU: CUDA graph replays between events, with cold or with warm caches."""

import time
from collections.abc import Callable, Iterable
from functools import cache

import torch

from benchmarks.harness import Timing, quantiles

ROUNDS = 50
EAGER_SECONDS = 1.0
MIN_EAGER_ROUNDS = 10
WARM_CALLS = 16
FLUSH_FACTOR = 6  # bytes read between two cold replays, in sizes of the L2
SPIN_CYCLES = 100_000  # keeps the GPU busy while the CPU queues a replay
COPY_BYTES = 1 << 30


@cache
def flush_buffer() -> torch.Tensor:
    """More than five times the L2, read to push everything else out of it."""
    size = FLUSH_FACTOR * torch.cuda.get_device_properties(0).L2_cache_size
    return torch.ones(size // 4, device="cuda")


def flush() -> None:
    flush_buffer().amax()


def spin() -> None:
    torch.cuda._sleep(SPIN_CYCLES)


def capture(function: Callable[[int], object], sets: Iterable[int]) -> Callable[[], None]:
    """A replay of `function` on each of the sets, one after the other."""
    sets = list(sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and loads kernels, fills handles and workspaces
        for i in sets[:3]:
            function(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in sets:
            function(i)
    return graph.replay


def can_capture(function: Callable[[int], object]) -> bool:
    """Whether a graph can hold the function: it must not wait for the GPU."""
    try:
        capture(function, [0])
    except RuntimeError:
        torch.cuda.synchronize()
        return False
    return True


def time_replays(
    replays: dict[str, tuple[Callable, int]], before: Callable, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Time per call of graphs of so many calls each, replayed in turn, `before` untimed."""
    events = {name: [] for name in replays}
    for _ in range(rounds):
        for name, (replay, _) in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            start.record()
            replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: quantiles([start.elapsed_time(end) * 1e3 / calls for start, end in events[name]])
        for name, (_, calls) in replays.items()
    }


def time_cold(functions: dict[str, Callable[[int], object]], num_sets: int) -> dict[str, Timing]:
    """Every call of a replay reads its own input set, none of which is in the L2."""
    replays = {
        name: (capture(function, range(num_sets)), num_sets) for name, function in functions.items()
    }
    return time_replays(replays, before=flush)


def time_warm(function: Callable[[int], object]) -> Timing:
    """Calls on one input set, again and again: what fits in the L2 is there."""
    replay = capture(function, [0] * WARM_CALLS)
    replay()
    return time_replays({"warm": (replay, WARM_CALLS)}, before=spin)["warm"]


def time_eager(function: Callable[[int], object], num_sets: int) -> Timing:
    """Wall-clock time of what a graph cannot hold, because it looks at its results on the way."""
    function(0)
    samples: list[float] = []
    end = time.perf_counter() + EAGER_SECONDS
    while len(samples) < MIN_EAGER_ROUNDS or time.perf_counter() < end:
        flush()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(len(samples) % num_sets)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return quantiles(samples)


@cache
def copy_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(1 << 20, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    return source, torch.empty_like(source)


def copy_of(num_bytes: int) -> Callable[[int], None]:
    """A function that reads and writes `num_bytes` in sum, elsewhere in the buffers at each set.

    By a kernel that changes the sign: a graph gives plain copies to a copy engine, which reaches
    two thirds of the bandwidth (2.8 of 4.3 TB/s on an H200).
    """
    source, target = copy_buffers()
    whole, rest = divmod(-(-num_bytes // 8), len(source))

    def run(i: int) -> None:
        for _ in range(whole):
            torch.neg(source, out=target)
        if rest:
            start = i % (len(source) // rest) * rest // 128 * 128
            torch.neg(source[start : start + rest], out=target[start : start + rest])

    return run


@cache
def copy_bandwidth() -> float:
    """Bytes per second read and written by a device-to-device copy, once per process."""
    timing = time_cold({"copy": copy_of(2 * COPY_BYTES)}, num_sets=1)["copy"]
    return 2 * COPY_BYTES / timing.median_us * 1e6
