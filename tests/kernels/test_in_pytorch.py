"""Every op as a part of PyTorch: compiled, beside autograd, whatever torch's defaults are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

import fastspec_kernels
from fastspec_kernels import library
from fastspec_kernels.reference.rng import gumbel

from .border_cases import CALLS
from .cases import backends_of, device_of

WRITTEN = {
    "penalize": ("logits",),
    "store_kv": ("key_cache", "value_cache"),
    "compact_kv": ("key_caches", "value_caches"),
    "decoder_layers": ("key_caches", "value_caches", "kept_caches"),
    "draft_chain": ("key_caches", "value_caches", "hidden_cache"),
}
WITH_BACKENDS = [(op, backend) for op in CALLS for backend in backends_of(op)]


def tensors_of(values) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def call_of(op: str, backend: str) -> dict:
    torch.manual_seed(0)
    device = device_of(backend)
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, CALLS[op]())


def outcome(op: str, backend: str, run: Callable = lambda f, given: f(given)) -> list[Tensor]:
    """What a call returns, and what it leaves in the tensors that it writes."""
    given = call_of(op, backend)
    out = run(lambda given: getattr(fastspec_kernels, op)(**given, backend=backend), given)
    return tensors_of([out, [given[name] for name in WRITTEN.get(op, ())]])


@pytest.mark.parametrize("op", [op for op in CALLS if library.has_kernel(op, "cpu")])
def test_it_compiles_without_a_graph_break(op):
    def compiled(call, given):
        torch._dynamo.reset()
        return torch.compile(call, fullgraph=True, backend="aot_eager")(given)

    with torch.no_grad():
        expected, found = outcome(op, "cpu"), outcome(op, "cpu", compiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "backend"), WITH_BACKENDS)
def test_results_are_detached(op, backend):
    """On every backend alike, so that no gradient is lost on its way back."""
    given = call_of(op, backend)
    leaves = {name: value for name, value in given.items() if name not in WRITTEN.get(op, ())}
    for tensor in tensors_of(leaves):
        tensor.requires_grad_(tensor.is_floating_point())
    out = getattr(fastspec_kernels, op)(**given, backend=backend)
    assert not any(tensor.requires_grad for tensor in tensors_of(out))


@pytest.mark.parametrize(("op", "backend"), [pair for pair in WITH_BACKENDS if pair[0] in WRITTEN])
def test_autograd_sees_what_is_written_in_place(op, backend):
    given = call_of(op, backend)
    written = tensors_of([given[name] for name in WRITTEN[op]])
    weight = torch.ones(1, requires_grad=True, device=written[0].device)
    losses = [(weight * tensor.float()).sum() for tensor in written]  # save what is overwritten
    getattr(fastspec_kernels, op)(**given, backend=backend)
    for tensor, loss in zip(written, losses, strict=True):
        assert tensor._version > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(("op", "backend"), WITH_BACKENDS)
def test_defaults_of_torch_change_nothing(op, backend):
    """Neither the default dtype nor the default device."""

    def changed(call, given):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                return call(given)
        finally:
            torch.set_default_dtype(torch.float32)

    expected, found = outcome(op, backend), outcome(op, backend, changed)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_noise_of_the_reference_is_exact():
    """Its logarithms are taken in float64, where neighbours of 2 ** -28 differ."""
    noise = gumbel(torch.arange(3), torch.arange(3), 5000)
    assert noise.dtype == torch.float64
    assert (noise != noise.float()).double().mean() > 0.99


@pytest.mark.parametrize(
    ("op", "backend"), [pair for pair in WITH_BACKENDS if "key_cache" in CALLS[pair[0]]()]
)
def test_strides_of_a_dimension_of_one_do_not_matter(op, backend):
    """Caches of one KV head may be permuted, and have the strides of another layout."""
    given = call_of(op, backend)
    names = [name for name in ("key", "value", "key_cache", "value_cache") if name in given]
    given |= {name: given[name][..., :1, :].contiguous() for name in names}
    odd = {name: tensor.clone() for name, tensor in given.items() if name.endswith("_cache")}
    sizes, (block, slot, _, _) = odd["key_cache"].shape, odd["key_cache"].stride()
    odd["key_cache"] = odd["key_cache"].as_strided(sizes, (block, slot, 999, 1))
    odd["value_cache"] = odd["value_cache"].as_strided(sizes, (block, slot, 7, 1))
    function = getattr(fastspec_kernels, op)
    expected, found = (
        tensors_of([function(**each, backend=backend), each["key_cache"], each["value_cache"]])
        for each in (given, given | odd)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
