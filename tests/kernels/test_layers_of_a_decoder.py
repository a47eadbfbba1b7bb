"""`rms_norm` and `gated_mlp`: right against float64, rows independent, bad input named."""

from itertools import product

import pytest
import torch

from fastspec_kernels import available_backends, gated_mlp, reference, rms_norm

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = [name for name in available_backends() if name in ("cpu", "reference")]
SIZES = [1, 7, 16, 40, 100, 192]
ROWS = [0, 1, 2, 5, 33]


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def norm_case(rows, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    x = 3 * torch.randn(rows, size, generator=generator)
    return x.to(dtype), torch.randn(size, generator=generator).to(dtype), 1e-6


def mlp_case(rows, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    shapes = ((rows, size), (2 * size + 1, size), (2 * size + 1, size), (size, 2 * size + 1))
    weights = (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes)
    return tuple(weight.to(dtype) for weight in weights)


OPS = [(rms_norm, reference.rms_norm, norm_case), (gated_mlp, reference.gated_mlp, mlp_case)]
IDS = ["rms_norm", "gated_mlp"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("op", "truth", "case"), OPS, ids=IDS)
def test_values(backend, dtype, op, truth, case):
    tolerance = TOLERANCE[dtype]
    for rows, size in product(ROWS, SIZES):
        arguments = case(rows, size, dtype)
        actual = op(*arguments, backend=backend)
        torch.testing.assert_close(actual, truth(*arguments), atol=tolerance / 10, rtol=tolerance)
        stacked = op(arguments[0][None], *arguments[1:], backend=backend)
        assert torch.equal(stacked[0], actual), (rows, size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("op", "truth", "case"), OPS, ids=IDS)
def test_a_rows_bits_do_not_depend_on_the_call(dtype, op, truth, case, restore_threads):
    x, *others = case(9, 100, dtype)
    alone = torch.cat([op(row[None], *others) for row in x])
    for threads, count in product((1, 2), (1, 2, 3, 5, 9)):
        torch.set_num_threads(threads)
        assert torch.equal(op(x[:count], *others), alone[:count]), (threads, count)


def test_large_activations_do_not_overflow():
    x = torch.tensor([[300.0, -300.0]])
    identity = torch.eye(2)
    expected = torch.tensor([[300.0 * 300.0, 0.0]])
    torch.testing.assert_close(gated_mlp(x, identity, identity, identity), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", [-90.0, -1e30, -3e38, -torch.inf])
def test_gates_of_any_size_are_those_of_torch(backend, gate):
    """A large negative gate lets nothing through, and an infinite one shows."""
    x, gates = torch.ones(1, 1), torch.full((20, 1), gate)
    up, down = torch.full((20, 1), 1000.0), torch.full((1, 20), 0.05)
    expected = torch.nn.functional.silu(gates[:1]) * 1000.0
    out = gated_mlp(x, gates, up, down, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-20, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_infinite_row_is_infinite_for_any_number_of_hidden_values(dtype):
    """What pads the hidden values has no part in the result."""
    for hidden, rows in product((1, 2, 15, 16, 17, 31, 32, 33, 49), (1, 17)):
        x = torch.zeros(rows, 32, dtype=dtype)
        x[:, 0] = torch.inf
        wide, narrow = torch.ones(hidden, 32, dtype=dtype), torch.ones(32, hidden, dtype=dtype)
        assert (gated_mlp(x, wide, wide, narrow) == torch.inf).all(), (hidden, rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "case", "index", "change", "named"),
    [
        (rms_norm, norm_case, 0, lambda t: t.bfloat16(), "input"),
        (rms_norm, norm_case, 0, lambda t: t[:, 1:].contiguous(), "input"),
        (rms_norm, norm_case, 0, lambda t: t.T.contiguous().T, "input"),
        (rms_norm, norm_case, 1, lambda t: t[None], "weight"),
        (rms_norm, norm_case, 1, lambda t: t.double(), "weight"),
        (rms_norm, norm_case, 0, lambda t: t[0, 0], "input"),
        (rms_norm, norm_case, 0, lambda t: t.to("meta"), "input"),
        (rms_norm, norm_case, 1, lambda t: None, "weight"),
        (rms_norm, norm_case, 2, lambda eps: -eps, "eps"),
        (rms_norm, norm_case, 2, lambda eps: float("nan"), "eps"),
        (gated_mlp, mlp_case, 0, lambda t: t[0, 0], "input"),
        (gated_mlp, mlp_case, 1, lambda t: None, "gate_weight"),
        (gated_mlp, mlp_case, 2, lambda t: t.to("meta"), "up_weight"),
        (gated_mlp, mlp_case, 0, lambda t: t.double(), "input"),
        (gated_mlp, mlp_case, 1, lambda t: t[:, 0], "gate_weight"),
        (gated_mlp, mlp_case, 2, lambda t: t[:-1], "up_weight"),
        (gated_mlp, mlp_case, 3, lambda t: t.T.contiguous(), "down_weight"),
        (gated_mlp, mlp_case, 3, lambda t: t.half(), "down_weight"),
    ],
)
def test_errors(backend, op, case, index, change, named):
    arguments = list(case(3, 16))
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=f"^{named}: "):
        op(*arguments, backend=backend)


def test_registration():
    torch.library.opcheck(torch.ops.fastspec.rms_norm, norm_case(3, 16))
    torch.library.opcheck(torch.ops.fastspec.gated_mlp, mlp_case(3, 16))
