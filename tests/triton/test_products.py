"""Products of few rows: right against float64, and each row's bits independent of the others."""

import pytest
import torch
from torch.nn.functional import gelu, silu

pytest.importorskip("triton", reason="triton is not installed")

from fastspec_kernels.triton import products

pytestmark = pytest.mark.gpu  # there they are compiled
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of the norm: one rounding
# Inputs and outputs of each matrix: of odd length, of whole tiles, shorter than a tile.
SIZES = [(48, (33, 16, 17)), (256, (16, 32)), (259, (5,)), (640, (64,))]


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + len(shape) + shape[0])
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, dtype)


def close(out, expected, dtype):
    assert out.dtype == dtype
    assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("depth", "sizes"), SIZES)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 16])
def test_products_of_few_rows(num_rows, depth, sizes, has_bias, dtype):
    rows = random(num_rows, depth, dtype=dtype)
    weights = tuple(random(size, depth, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    biases = tuple(random(size, dtype=dtype) if has_bias else None for size in sizes)
    outs = products.linear(rows, weights, biases)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
        close(out, expected, dtype)


def test_biases_of_some_matrices():
    rows, weight = (random(4, 48, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    bias = random(4, dtype=torch.bfloat16)
    outs = products.linear(rows, (weight, weight), (None, bias))
    expected = rows.double() @ weight.double().T
    close(outs[0], expected, torch.bfloat16)
    close(outs[1], expected + bias.double(), torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("num_rows", "depth", "size"), [(1, 48, 33), (5, 256, 64), (16, 259, 5)])
def test_gated_products_of_few_rows(num_rows, depth, size, activation, dtype):
    rows = random(num_rows, depth, dtype=dtype)
    gate, up = (random(size, depth, dtype=dtype, seed=seed) for seed in (1, 2))
    out = products.gated(rows, gate, up, activation)
    x = rows.double() @ gate.double().T
    active = silu(x) if activation == "silu" else gelu(x, approximate="tanh")
    close(out, active * (rows.double() @ up.double().T), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nothing_beyond_the_rows_is_read_or_written(dtype):
    """Poison around rows, weights and outputs, which are parts of larger tensors."""
    rows = torch.full((9, 259), torch.nan, device=DEVICE, dtype=dtype)
    rows[3:6] = random(3, 259, dtype=dtype)
    weights = torch.full((40, 259), torch.nan, device=DEVICE, dtype=dtype)
    weights[7:24] = random(17, 259, dtype=dtype)
    (out,) = products.linear(rows[3:6], (weights[7:24],), (None,))
    assert out.isfinite().all()
    assert products.gated(rows[3:6], weights[7:24], weights[7:24], "silu").isfinite().all()


@pytest.mark.usefixtures("fixed_order_products")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bits_of_a_row_are_its_own(dtype):
    rows = random(16, 300, dtype=dtype)
    weights = tuple(random(size, 300, dtype=dtype, seed=size) for size in (40, 24))
    whole = products.linear(rows, weights, (None, None))
    gated = products.gated(rows, weights[0], weights[0], "silu")
    for first, last in ((0, 1), (3, 8), (2, 13)):
        part = products.linear(rows[first:last], weights, (None, None))
        for own, all_rows in zip(part, whole, strict=True):
            assert torch.equal(own, all_rows[first:last])
        own = products.gated(rows[first:last], weights[0], weights[0], "silu")
        assert torch.equal(own, gated[first:last])


def test_many_rows_and_float32_go_to_torch():
    for rows in (random(17, 48, dtype=torch.bfloat16), random(2, 48, dtype=torch.float32)):
        weight = random(33, 48, dtype=rows.dtype)
        (out,) = products.linear(rows, (weight,), (None,))
        assert torch.equal(out, rows @ weight.T)


@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_matrices_side_by_side_are_one_product(monkeypatch, num_biases):
    """Unless only some of them have a bias."""
    rows = random(17, 48, dtype=torch.bfloat16)
    both, bias = random(49, 48, dtype=torch.bfloat16), random(49, dtype=torch.bfloat16)
    given = [None, None]
    given[:num_biases] = bias.split([33, 16])[:num_biases]
    check_products(monkeypatch, rows, both.split([33, 16]), given, 2 if num_biases == 1 else 1)


def check_products(monkeypatch, rows, weights, biases, num_products):
    calls, product = [], products.F.linear
    monkeypatch.setattr(products.F, "linear", lambda *args: calls.append(1) or product(*args))
    outs = products.linear(rows, tuple(weights), tuple(biases))
    assert len(calls) == num_products
    for out, weight, own in zip(outs, weights, biases, strict=True):
        exact = rows.double() @ weight.double().T + (0 if own is None else own.double())
        close(out, exact, torch.bfloat16)


@pytest.mark.parametrize("where", ["bias elsewhere", "other order", "elsewhere", "transposed"])
def test_matrices_that_do_not_follow_each_other_are_several_products(monkeypatch, where):
    rows = random(17, 48, dtype=torch.bfloat16)
    first, second = random(96, 48, dtype=torch.bfloat16).split(48)
    biases = [None, None]
    if where == "bias elsewhere":
        biases = [random(48, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
    elif where == "other order":
        first, second = second, first
    elif where == "elsewhere":
        second = second.clone()
    else:
        first, second = random(2, 48, 48, dtype=torch.bfloat16).transpose(1, 2).unbind()
    check_products(monkeypatch, rows, (first, second), biases, 2)


def test_only_matrices_of_a_kind_are_one():
    """Others may follow each other, too."""
    both = random(96, 48, dtype=torch.bfloat16)
    first, second = both.split(48)
    joined = products._joined((first, second))
    assert joined is not None
    assert torch.equal(joined, both)
    one_row = both.as_strided((1, 48), (7, 1))
    assert torch.equal(products._joined((one_row, both[1:])), both)
    assert products._joined((first, second.view(torch.float16))) is None
    assert products._joined((first, second.view(24, 96))) is None


@pytest.mark.parametrize("is_joined", [False, True])
def test_gated_products_of_many_rows(is_joined):
    rows, both = random(17, 48, dtype=torch.bfloat16), random(66, 48, dtype=torch.bfloat16)
    gate, up = both.split(33)
    up = up if is_joined else up.clone()
    out = products.gated(rows, gate, up, "silu")
    assert out.stride() == ((66, 1) if is_joined else (33, 1))
    exact = silu(rows.double() @ gate.double().T) * (rows.double() @ up.double().T)
    assert (out.double() - exact).norm() <= 5e-3 * exact.norm()  # gate and up are rounded first
