"""The layers of one op agree: public signature, reference, schema, fake and kernel."""

import inspect

import pytest
import torch

import fastspec_kernels
from fastspec_kernels import library, reference

from .cases import ints

ROW_OPS = ["row_stats", "logits_to_probs", "sample", "sample_coupled", "penalize"]
OPS = [*ROW_OPS, "verify_chain", "verify_tree", "build_tree"]
BORDER_ONLY = {"backend"}


@pytest.mark.parametrize("op", OPS)
def test_signatures_agree(op):
    public = [
        name
        for name in inspect.signature(getattr(fastspec_kernels, op)).parameters
        if name not in BORDER_ONLY
    ]
    schema = getattr(torch.ops.fastspec, op).default._schema
    assert public == list(inspect.signature(getattr(reference, op)).parameters)
    assert public == [argument.name for argument in schema.arguments]


def penalties():
    """What follows the logits of two rows for each of two sequences."""
    rows = ints(0, 0, 1, 1), ints(0, 1, 0, 1), ints([0, 1], [0, 2])
    history = ints(0, 1, 3), ints(1, 1, 2), ints(0, 1, 2)
    bias = ints(0, 1, 2), ints(4, 5), torch.zeros(2), ints(1, 1)
    return (*rows, *history, *bias, ints([-1, 0], [-1, 0]), *torch.ones(3, 2))


def arguments(op, dtype):
    logits = torch.randn(4, 50).to(dtype)
    params = (torch.ones(4), torch.full((4,), 9, dtype=torch.int32), None, torch.zeros(4))
    bitmask = torch.full((4, 2), -1, dtype=torch.int32)
    if op == "build_tree":
        return (torch.tensor([[-1, 0, 1], [-1, 0, 0]], dtype=torch.int32),)
    if op == "sample":
        return (logits, torch.rand(4), *params, bitmask)
    if op == "sample_coupled":
        return (logits, torch.arange(4), torch.arange(4), *params, bitmask)
    if op == "penalize":
        return (logits, *penalties())
    if op in ("row_stats", "logits_to_probs"):
        return (logits, *params, bitmask)
    tokens = torch.zeros(2, 1, dtype=torch.int32)
    cu_rows = torch.tensor([0, 2, 4], dtype=torch.int32)
    two = [None if param is None else param[:2].clone() for param in params]
    columns = torch.arange(50, dtype=torch.int32)
    if op == "verify_tree":
        nodes = torch.zeros(2, 2, dtype=torch.int32)
        parents = torch.tensor([[-1, 0]] * 2, dtype=torch.int32)
        draft = (torch.rand(2, 3), "with_replacement", torch.randn(2, 2, 40).to(dtype))
        return (logits, cu_rows, nodes, parents, *draft, *two, columns, bitmask)
    draft_logits = torch.randn(2, 1, 40).to(dtype)
    extras = (1.0, "standard", torch.full((2, 1), 4.0), columns, bitmask)
    return (logits, cu_rows, tokens, torch.rand(2, 2), draft_logits, *two, *extras)


@pytest.mark.parametrize("op", [op for op in OPS if library.has_kernel(op, "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(op, dtype):
    torch.library.opcheck(getattr(torch.ops.fastspec, op).default, arguments(op, dtype))


@pytest.mark.parametrize("op", OPS)
def test_fake_matches_reference(op):
    """Shapes and dtypes of the fake implementation are those of the reference."""
    case = arguments(op, torch.float32)
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in case]
    fakes = getattr(torch.ops.fastspec, op)(*on_meta)
    reals = getattr(reference, op)(*case)
    if not isinstance(reals, tuple):
        fakes, reals = [fakes], [reals]
    for fake, real in zip(fakes, reals, strict=True):
        assert fake is real or (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("op", OPS)
def test_reference_never_reads_values(op):
    """It runs on tensors without data, so it never waits for a device and can be captured."""
    case = arguments(op, torch.float32)
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in case]
    outputs = getattr(reference, op)(*on_meta)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(out is None or out.is_meta for out in outputs)


def misfits(value):
    """The same argument with another dtype, rank or length, or with gaps in its rows."""
    if isinstance(value, str):
        return ["typo"]
    if isinstance(value, float):
        return [0.5, float("nan"), float("inf")]
    if not isinstance(value, torch.Tensor):
        return []
    whole = torch.int32 if value.dtype == torch.int64 else torch.int64
    other = torch.float64 if value.is_floating_point() else whole
    found = [value.to(other), value[None], value[:-1]]
    if value.dim() > 1 and value.shape[-1] > 1:
        found.append(torch.stack([value, value], -1)[..., 0])
    return found


@pytest.mark.parametrize("op", [op for op in OPS if library.has_kernel(op, "cpu")])
def test_the_kernel_itself_refuses_what_does_not_fit(op):
    """Nothing but an error comes of a call that passes by the public op."""
    kernel = getattr(torch.ops.fastspec, op).default
    case = arguments(op, torch.float32)
    kernel(*case)
    for index in range(len(case)):
        for misfit in misfits(case[index]):
            if op == "build_tree" and len(misfit) < len(case[index]):
                continue  # a batch of fewer trees
            with pytest.raises((RuntimeError, ValueError)):
                kernel(*case[:index], misfit, *case[index + 1 :])
