"""Kernels are launched on the device of their tensors, whichever is current."""

import inspect
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="triton is not installed")

from fastspec_kernels import backend  # noqa: E402
from fastspec_kernels import triton as ops  # noqa: E402
from fastspec_kernels.triton import launch  # noqa: E402
from fastspec_kernels.triton.attention_kernels import attention_kernel  # noqa: E402

from ..kernels.border_cases import CALLS  # noqa: E402

SECOND = torch.device("cuda", 1)


@pytest.fixture
def devices(monkeypatch):
    """The current device of each launch; nothing runs."""
    current, found = [torch.device("cuda", 0)], []

    @contextmanager
    def on_device(device):
        current.append(torch.device(device))
        yield
        current.pop()

    def run(kernel, *args, grid, **kwargs):
        found.append(current[-1])

    launch._may_overlap.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(type(attention_kernel), "run", run)
    yield found
    launch._may_overlap.cache_clear()


def on_second(value):
    """Tensors moved; of a list of layers their weights in a row, as kernels take them."""
    if isinstance(value, list):
        groups = (item if isinstance(item, tuple) else (item,) for item in value)
        return [on_second(tensor) for group in groups for tensor in group]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=SECOND)


@pytest.mark.parametrize("op", sorted(backend.TRITON_OPS))
def test_the_device_of_the_tensors_is_current(op, devices):
    function = getattr(ops, op)
    arguments = CALLS[op]()
    with FakeTensorMode():
        function(
            **{name: on_second(arguments[name]) for name in inspect.signature(function).parameters}
        )
    assert devices
    assert set(devices) == {SECOND}


def test_an_empty_grid_is_no_launch(devices):
    for grid in (0, (0, 1), (2, 0, 1)):
        launch.launch(attention_kernel, grid, torch.empty(1), num_warps=1)
    assert devices == []
