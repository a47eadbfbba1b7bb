"""`linear`: right against float64, and each row independent of the others, bit for bit."""

from itertools import product

import pytest
import torch

from fastspec_kernels import available_backends, linear

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = [name for name in available_backends() if name in ("cpu", "reference")]
SHAPES = [(1, 1), (1, 7), (3, 16), (17, 33), (16, 64), (40, 192), (257, 100), (5, 1000)]
SHAPES += [(19, 7000)]  # several rows do not stay in the nearest cache
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(rows, num_outputs, depth, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*s, generator=generator) for s in ((rows, depth), (num_outputs, depth))]
    bias = torch.randn(num_outputs, generator=generator)
    return [tensor.to(dtype) for tensor in (*tensors, bias)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values(backend, dtype):
    tolerance = TOLERANCE[dtype]
    for shape, rows in product(SHAPES, (0, 1, 2, 3, 5, 8, 12, 33, 50)):
        x, weight, bias = case(rows, *shape, dtype)
        for given in (bias, None):
            expected = x.double() @ weight.double().T + (0 if given is None else given.double())
            actual = linear(x, weight, given, backend=backend)
            assert actual.dtype == dtype
            error, bound = (actual.double() - expected).abs(), tolerance * shape[1] ** 0.5
            assert (error <= bound + tolerance * expected.abs()).all(), (shape, rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_rows_bits_do_not_depend_on_the_call(dtype, restore_threads):
    for shape in SHAPES:
        x, weight, bias = case(70, *shape, dtype)
        alone = torch.cat([linear(row[None], weight, bias) for row in x])
        for threads, count in product((1, 2, 3), (*range(1, 14), 17, 33, 50, 70)):
            torch.set_num_threads(threads)
            out = linear(x[:count], weight, bias)
            assert torch.equal(out, alone[:count]), (shape, threads, count)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_that_go_in_parts_have_the_same_bits(dtype):
    x, weight, bias = case(200, 19, 3000, dtype)
    out = linear(x, weight, bias)
    for first in range(0, 200, 5):
        part = slice(first, first + 5)
        assert torch.equal(out[part], linear(x[part], weight, bias)), first


def test_leading_dimensions():
    x, weight, bias = case(6, 10, 20, torch.float32)
    expected = linear(x, weight, bias)
    assert torch.equal(linear(x.view(2, 3, 20), weight, bias), expected.view(2, 3, 10))
    assert torch.equal(linear(x[0], weight, bias), expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sums_are_the_bias(backend):
    bias = torch.arange(5.0)
    out = linear(torch.ones(2, 3, 0), torch.ones(5, 0), bias, backend=backend)
    assert torch.equal(out, bias.expand(2, 3, 5))
    assert linear(torch.ones(3, 4), torch.ones(0, 4), backend=backend).shape == (3, 0)


def test_infinities_and_nan_stay_in_their_row():
    x, weight, _ = case(3, 20, 40, torch.float32)
    clean = linear(x, weight)
    x[1, 3] = float("nan")
    out = linear(x, weight)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, w, b: (x[:, :-1].contiguous(), w, b), "input"),
        (lambda x, w, b: (x.double(), w, b), "input"),
        (lambda x, w, b: (x.T.contiguous().T, w, b), "input"),
        (lambda x, w, b: (x, w[:, 0], b), "weight"),
        (lambda x, w, b: (x, w.T.contiguous().T, b), "weight"),
        (lambda x, w, b: (x, w.double(), b), "weight"),
        (lambda x, w, b: (x, w, b[:-1]), "bias"),
        (lambda x, w, b: (x, w, b.bfloat16()), "bias"),
        (lambda x, w, b: (None, w, b), "input"),
        (lambda x, w, b: (x[0, 0], w, b), "input"),
        (lambda x, w, b: (x.to("meta"), w, b), "input"),
        (lambda x, w, b: (x, w[..., None], b), "weight"),
        (lambda x, w, b: (x, w, b.to("meta")), "bias"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors(change, named, backend):
    with pytest.raises(ValueError, match=f"^{named}: "):
        linear(*change(*case(3, 5, 8, torch.float32)), backend=backend)


def test_registration():
    for dtype in TOLERANCE:
        torch.library.opcheck(torch.ops.fastspec.linear, tuple(case(3, 5, 8, dtype)))
