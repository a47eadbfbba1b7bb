"""`decoder_layers` by interpreted kernels: every option, alone and together."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from fastspec import EngineConfig
from fastspec.models.layout import Span
from fastspec.models.paged_model import PagedModel
from fastspec.models.runner import ModelRunner
from tests.engine.probes import is_flat
from tests.kernels.test_decoder_layers import (
    FULL,
    TOLERANCE,
    Layers,
    check_call,
    tolerance_of,
    written,
)
from tests.models import random_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/kernels runs the compiled kernels"
)
CALL = ([0, 1, 2, 3, 4], [[4, 0], [2, 3]], [6, 3], [3, 2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("sizes", [{}, {"size": 33, "hidden": 17, "head_size": 10, "heads": 2}])
def test_values(dtype, full, sizes):
    layers = Layers(dtype, full, **sizes)
    check_call(layers, CALL, "triton", tolerance_of(dtype, "triton"))


@pytest.mark.parametrize("option", FULL)
def test_each_option_alone(option):
    layers = Layers(torch.float32)
    layers.options = {**layers.options, option: FULL[option]}
    check_call(layers, CALL, "triton", TOLERANCE[torch.float32])


@pytest.mark.parametrize("weight", ["query_norm", "key_norm", "attention_out_norm", "mlp_out_norm"])
def test_each_norm_alone(weight):
    layers, full = Layers(torch.float32), Layers(torch.float32, full=True)
    pairs = zip(layers.weights, full.weights, strict=True)
    layers.weights = [own._replace(**{weight: getattr(other, weight)}) for own, other in pairs]
    check_call(layers, CALL, "triton", TOLERANCE[torch.float32])


def test_nothing_is_written_for_the_slot_minus_one():
    slots = {"slot_mapping": torch.tensor([-1]), "backend": "triton"}
    assert written(Layers(torch.float32), **slots) == ([False] * 4, "")


def test_heads_that_are_too_wide_are_refused_before_anything_is_written():
    layers = Layers(torch.float32, head_size=320, heads=1, kv_heads=1)
    changed, error = written(layers, backend="triton")
    assert not any(changed)
    assert error.startswith("key_caches: head size 320")


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_models_run_without_their_modules(architecture):
    model = random_model(architecture)
    logits = []
    for backend in ("triton", "reference"):
        paged = PagedModel(model, backend)
        assert is_flat(paged) == (backend == "triton")
        config = EngineConfig(block_size=16, prefill_chunk_size=64, cuda_graphs="off")
        runner = ModelRunner(paged, 9, config)
        spans = [Span([3], 0, 5), Span([1, 7], 0, 17)]
        logits.append(runner.forward(torch.arange(5, 27), spans, [4, 21]))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
