"""How CUDA graphs are captured, by torch's own context on a stand-in for the GPU."""

from contextlib import nullcontext
from threading import Barrier, Thread, local
from time import sleep

import pytest
import torch

from fastspec.models.graphs import CudaCapture, GraphedForward
from fastspec.models.paged_model import PagedModel

from ..models import random_model


class Stream:
    def wait_stream(self, other):
        """Nothing runs on it."""


class UseStream:
    """As torch's, it restores the stream only on exit, not when it is garbage."""

    def __init__(self, gpu, stream):
        self._gpu, self._stream = gpu, stream

    def __enter__(self):
        self._before = self._gpu.current_stream()
        self._gpu.of_thread.stream = self._stream

    def __exit__(self, *args):
        self._gpu.of_thread.stream = self._before


class Gpu:
    """It cannot wait while it captures, nor end a capture in which something failed."""

    def __init__(self):
        self.of_thread, self._default = local(), Stream()
        self.num_capturing = 0
        self.has_failed = False

    def current_stream(self):
        return getattr(self.of_thread, "stream", self._default)

    def stream(self, stream):
        return UseStream(self, stream)

    def synchronize(self):
        if self.num_capturing:
            self.has_failed = True
            raise RuntimeError("operation not permitted when stream is capturing")


class Graph:
    def __init__(self, gpu):
        self._gpu = gpu

    def capture_begin(self, *args, **options):
        self._gpu.num_capturing += 1

    def capture_end(self):
        self._gpu.num_capturing -= 1
        if self._gpu.has_failed:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    for name in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(gpu))
    return gpu


def waiting(gpu):
    """What works, but not while it is captured."""

    def run():
        gpu.synchronize()

    return run


def test_a_failed_capture_leaves_the_stream(gpu):
    """Otherwise this thread's work would from then on run beside that of the other threads."""
    before = gpu.current_stream()
    with pytest.raises(RuntimeError):
        CudaCapture(torch.device("cuda"))(waiting(gpu))
    assert gpu.current_stream() is before


def test_the_reason_of_a_failed_capture_is_told(gpu):
    model = PagedModel(random_model("llama"), "auto")
    graphed = GraphedForward(model, {}, 16, CudaCapture(torch.device("cuda")), must=True)
    with pytest.raises(ValueError, match=r"^cuda_graphs: 'on'.* not permitted when stream is"):
        graphed.captured(waiting(gpu))


def test_one_thread_captures_at_a_time(gpu):
    """Two engines may be used by two threads."""
    both_run, failures = Barrier(2), []

    def capture():
        num_runs = []

        def run():
            num_runs.append(None)
            if len(num_runs) == 1:  # before the capture
                both_run.wait()
            else:
                sleep(0.05)

        try:
            CudaCapture(torch.device("cuda"))(run)
        except RuntimeError as error:
            failures.append(str(error))

    threads = [Thread(target=capture) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
