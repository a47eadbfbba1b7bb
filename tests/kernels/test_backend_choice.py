"""Which backend serves a GPU that the CUDA extension may have no code for; no GPU is needed."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastspec_kernels
from fastspec_kernels import backend, library

OLD, NEW = torch.device("cuda", 0), torch.device("cuda", 1)
KERNELS = Path(library.__file__).parents[1]
COMPILED = {"store_kv", "verify_tree"}  # of the CUDA extension


@pytest.fixture
def two_gpus(monkeypatch):
    """A process with both GPU backends and two GPUs, of which the extension has code for one."""
    schema = torch.library.Library("fastspec", "IMPL")  # undone with the object
    schema.impl("cuda_architectures", lambda: "8.0;9.0+PTX", "CompositeExplicitAutograd")
    schema.impl("has_cuda_image", lambda device: device == 1, "CompositeExplicitAutograd")
    forget = library._has_image.cache_clear
    forget()
    backend._say_once.cache_clear()
    monkeypatch.setattr(library, "has_kernel", lambda op, device_type: op in COMPILED)
    monkeypatch.setattr(library, "HAS_CUDA_EXTENSION", True)
    monkeypatch.setattr(backend, "_runs_in_triton", lambda op, kind: op in backend.TRITON_OPS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    yield
    forget()
    schema._destroy()


def test_auto_goes_past_a_gpu_without_code_and_says_so_once(two_gpus, caplog):
    with caplog.at_level(logging.WARNING):
        assert backend.resolve("verify_tree", "auto", NEW) == "cuda"
        assert caplog.records == []
        for op in ("verify_tree", "store_kv", "verify_tree"):
            assert backend.resolve(op, "auto", OLD) == "triton"
    [record] = caplog.records
    assert "built for 8.0;9.0+PTX, but cuda:0 has compute capability 7.5" in record.getMessage()
    assert backend.backends_of("verify_tree", OLD) == ("triton", "reference")
    assert backend.backends_of("verify_tree", NEW) == ("cuda", "triton", "reference")


def test_what_cuda_has_no_kernel_of_goes_to_triton(two_gpus, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        for device in (OLD, NEW):
            assert backend.resolve("sample", "auto", device) == "triton"
            assert backend.backends_of("sample", device) == ("triton", "reference")
    assert caplog.records == []
    message = r"^backend: 'cuda' cannot run sample on a cuda tensor; available: triton, reference$"
    with pytest.raises(ValueError, match=message):
        backend.resolve("sample", "cuda", NEW)
    monkeypatch.setattr(backend, "_runs_in_triton", lambda op, kind: False)
    assert backend.resolve("sample", "auto", NEW) == "reference"


def test_what_the_reference_runs_by_default_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(library, "has_kernel", lambda op, device_type: False)
    backend._resolved_once.cache_clear()
    backend._say_once.cache_clear()
    arguments = "linear", "auto", torch.device("cpu"), torch.float32
    with caplog.at_level(logging.WARNING):
        assert backend._resolved_once("linear", "reference", *arguments[2:]) == "reference"
        assert caplog.records == []
        for _ in range(2):
            assert backend._resolved_once(*arguments) == "reference"
    [record] = caplog.records
    assert "no kernel of linear for a cpu tensor; the slow reference runs" in record.getMessage()
    backend._resolved_once.cache_clear()


def test_whoever_asks_is_told(two_gpus, monkeypatch):
    assert fastspec_kernels.backend_of("verify_tree", NEW) == "cuda"
    assert fastspec_kernels.backend_of("verify_tree", OLD, "cuda") is None
    assert fastspec_kernels.backend_of("sample", NEW, "cuda") is None
    monkeypatch.setattr(backend, "_DEFAULT", "reference")
    assert fastspec_kernels.backend_of("verify_tree", NEW) == "reference"


def test_who_asks_for_what_there_is_not_is_told_so():
    assert fastspec_kernels.backend_of("linear", "cpu", "reference") == "reference"
    with pytest.raises(ValueError, match=r"^op: expected one of .* got 'softmax'"):
        fastspec_kernels.backend_of("softmax", "cpu")
    for device in ("banana", torch.zeros(1)):
        with pytest.raises(ValueError, match=r"^device: "):
            fastspec_kernels.backend_of("linear", device)
    with pytest.raises(ValueError, match=r"^backend: expected one of .* got 'gpu'"):
        fastspec_kernels.backend_of("linear", "cpu", "gpu")


@pytest.mark.parametrize("name", ["gpu", ["cpu"], {}, None, 1])
def test_what_is_no_backend_is_refused_by_every_op(name):
    logits = torch.zeros(1, 8)
    with pytest.raises(ValueError, match=r"^backend: expected 'auto' or one of "):
        fastspec_kernels.row_stats(logits, backend=name)


def test_the_variable_is_checked_at_import():
    settings = os.environ | {"FASTSPEC_BACKEND": "gpu", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-c", "import fastspec_kernels"]
    run = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert "ValueError: FASTSPEC_BACKEND: expected one of" in run.stderr


def test_by_name_it_raises_with_what_is_available(two_gpus):
    assert backend.resolve("verify_tree", "cuda", NEW) == "cuda"
    message = r"^backend: 'cuda' cannot run verify_tree on a cuda tensor: .*7\.5; available: triton"
    with pytest.raises(ValueError, match=message):
        backend.resolve("verify_tree", "cuda", OLD)
    assert "compute capability 7.5" in backend.unavailable_backends()["cuda"]


def test_to_ask_what_is_available_sets_no_gpu_up(two_gpus, monkeypatch):
    def never(device_index):
        raise AssertionError("asked for the code of a GPU")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(library, "has_image", never)
    assert "cuda" in backend.available_backends()
