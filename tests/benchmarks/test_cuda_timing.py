"""The GPU timing on a stand-in for the GPU: what is called how often, and what is reported."""

import contextlib
import time

import pytest
import torch

from benchmarks import cuda_timing, measuring, workloads
from benchmarks.cases import Case
from benchmarks.peers import Peer


class Stream:
    def wait_stream(self, other):
        pass


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


class Graph:
    """Keeps the calls made while it is open and repeats them."""

    recording = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@contextlib.contextmanager
def graph(opened):
    Graph.recording = opened
    try:
        yield
    finally:
        Graph.recording = None


def recorded(function):
    """What a kernel does on a GPU: while a graph is open it is only noted."""

    def call(i):
        if Graph.recording is None:
            function(i)
        else:
            Graph.recording.calls.append(lambda: function(i))

    return call


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    buffer = torch.zeros(1 << 14, dtype=torch.int32)
    monkeypatch.setattr(cuda_timing, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(cuda_timing, "copy_buffers", lambda: (buffer, buffer.clone()))
    monkeypatch.setattr(cuda_timing, "flush_buffer", lambda: torch.zeros(8))
    monkeypatch.setattr(cuda_timing, "EAGER_SECONDS", 0.0)


def test_cold_replays_go_over_all_sets_and_flush_before_each(monkeypatch):
    calls, flushes = [], []
    monkeypatch.setattr(cuda_timing, "flush", lambda: flushes.append(len(calls)))
    timing = cuda_timing.time_cold({"ours": recorded(calls.append)}, num_sets=4)["ours"]
    warm_up = 3
    assert calls[warm_up:] == [0, 1, 2, 3] * cuda_timing.ROUNDS
    assert flushes == [warm_up + 4 * i for i in range(cuda_timing.ROUNDS)]
    assert cuda_timing.ROUNDS >= 50
    assert timing.median_us >= 0


def test_warm_replays_stay_on_one_set():
    calls = []
    cuda_timing.time_warm(recorded(calls.append))
    assert set(calls) == {0}


@pytest.mark.parametrize("num_bytes", [0, 2, 1000, 1 << 17, (1 << 18) + 10])
def test_copies_move_as_many_bytes_as_asked(num_bytes, monkeypatch):
    buffer, moved = torch.zeros(1 << 14, dtype=torch.int32), []
    neg = lambda source, out: moved.append(source.nbytes + out.nbytes)  # noqa: E731
    monkeypatch.setattr(cuda_timing, "copy_buffers", lambda: (buffer, buffer.clone()))
    monkeypatch.setattr(torch, "neg", neg)
    for i in range(5):
        moved.clear()
        cuda_timing.copy_of(num_bytes)(i)
        assert 0 <= sum(moved) - num_bytes < 8  # whole numbers of 4 bytes


def test_record_of_a_gpu_case():
    case = Case("verify_chain", 300, 2, "zipf", "float32", num_draft=3, rule="standard")
    workload = workloads.build(case, "reference", torch.device("cpu"), num_sets=2)

    def refuses(i):
        raise ImportError("not compiled")

    workload.peers["flashinfer"] = Peer(refuses)
    cuda_timing.copy_bandwidth.cache_clear()
    timings, more = measuring._time_on_gpu(workload, 10_000)
    cuda_timing.copy_bandwidth.cache_clear()
    peers = {"peer", "target_amax", "vllm_v2_bytes", "flashinfer_bytes"}
    assert set(timings) == {"ours", "floor", *peers}
    assert more["eager"] == ["peer"]
    assert more["peer_errors"] == {"flashinfer": "ImportError: not compiled"}
    assert more["warm_us"] > 0
    assert timings["floor"].median_us > 0


def test_what_waits_for_the_gpu_is_timed_without_a_graph():
    def waits(i):
        if Graph.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert not cuda_timing.can_capture(waits)
    assert cuda_timing.can_capture(lambda i: None)
