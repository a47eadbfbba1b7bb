"""`quantize_weight` and `quantized_linear`, against the format and the rule as stated here."""

from itertools import product

import numpy as np
import pytest
import torch

from fastspec_kernels import available_backends, quantize_weight, quantized_linear

from .conftest import INSTRUCTION_SETS

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = [name for name in available_backends() if name in ("cpu", "reference")]
BITS = (4, 8)
LIMITS = {4: (-8, 7), 8: (-127, 127)}
SHAPES = [(1, 1), (1, 31), (3, 32), (16, 33), (17, 64), (40, 65), (33, 95), (31, 97), (5, 1000)]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def places(num_outputs: int, depth: int, bits: int):
    """Of each weight: tile, block, byte in the block and shift; of its scale: byte in the block."""
    n, k = np.arange(num_outputs)[:, None], np.arange(depth)[None]
    lane, inside = n % 16, k % 64
    half, rest = inside // 32, inside % 32
    if bits == 8:
        byte, shift = 64 + 64 * (inside // 4) + 4 * lane + inside % 4, 0 * (n + k)
    else:
        byte, shift = 64 + 64 * (rest // 4) + 4 * lane + rest % 4, 4 * half + 0 * n
    return n // 16 + 0 * k, k // 64 + 0 * n, byte, shift, 32 * half + 2 * lane


def packed_by_hand(values: np.ndarray, scales: np.ndarray, bits: int) -> torch.Tensor:
    """Integers [N, K] and their scales [N, K], equal in each group of 32 and exact in bfloat16."""
    num_outputs, depth = values.shape
    zero = {4: 0x88, 8: 0x80}[bits]
    shape = (-(-num_outputs // 16), -(-depth // 64), 64 + 128 * bits)
    packed = np.full(shape, zero, np.uint8)
    packed[..., :64] = 0
    tile, block, byte, shift, scale_byte = places(num_outputs, depth, bits)
    if bits == 8:
        packed[tile, block, byte] = values + 128
    else:
        for nibble, kept in ((0, 0xF0), (4, 0x0F)):
            at = shift == nibble
            where = tile[at], block[at], byte[at]
            packed[where] = packed[where] & kept | (values[at] + 8) << nibble
    raw = scales.astype(np.float32).view(np.uint32)
    assert not (raw & 0xFFFF).any()
    packed[tile, block, scale_byte] = raw >> 16 & 0xFF
    packed[tile, block, scale_byte + 1] = raw >> 24
    return torch.from_numpy(packed)


def unpacked(packed: torch.Tensor, num_outputs: int, depth: int):
    """The integers and scales of each weight."""
    raw = packed.numpy()
    bits = (raw.shape[2] - 64) // 128
    tile, block, byte, shift, scale_byte = places(num_outputs, depth, bits)
    codes = raw[tile, block, byte].astype(np.int64)
    values = codes - 128 if bits == 8 else (codes >> shift & 15) - 8
    halves = raw[tile, block, scale_byte + 1].astype(np.uint32) << 24
    halves |= raw[tile, block, scale_byte].astype(np.uint32) << 16
    return values, halves.view(np.float32).astype(np.float64)


def rows_by_hand(x: torch.Tensor):
    """Integers and scales of each value of finite rows."""
    rows = x.float().numpy()
    values, scales = np.zeros(rows.shape), np.zeros(rows.shape)
    for begin in range(0, rows.shape[1], 32):
        group = rows[:, begin : begin + 32]
        most = np.abs(group).max(1, keepdims=True)
        kept = most >= np.float32(1e-30)
        inverse = np.float32(127) / np.where(kept, most, np.float32(1))
        values[:, begin : begin + 32] = np.where(kept, np.rint(group * inverse), 0)
        scales[:, begin : begin + 32] = np.where(kept, most / np.float32(127), 0)
    return values, scales


def expected_of(x, packed, num_outputs, bias=None):
    """The result in float64, and how far float32 sums of it may be off in any order."""
    values, scales = rows_by_hand(x)
    weights, weight_scales = unpacked(packed, num_outputs, x.shape[1])
    out = np.zeros((len(values), num_outputs))
    terms = np.zeros_like(out)
    for begin in range(0, x.shape[1], 32):
        group = slice(begin, begin + 32)
        part = values[:, group] @ weights[:, group].T
        part *= scales[:, begin, None] * weight_scales[:, begin]
        out, terms = out + part, terms + np.abs(part)
    if bias is not None:
        out, terms = out + bias.numpy(), terms + np.abs(bias.numpy())
    num_roundings = x.shape[1] // 32 + 4
    return torch.from_numpy(out), torch.from_numpy(num_roundings * 2.0**-24 * terms)


def assert_right(actual, expected, error):
    assert actual.shape == expected.shape
    bound = error + ROUNDING[actual.dtype] * (expected.abs() + error)
    bound += 2.0**-24 if actual.dtype == torch.float16 else 2.0**-133  # subnormal numbers
    assert ((actual.double() - expected).abs() <= bound).all()


def case(rows, num_outputs, depth, bits, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + depth)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weight = torch.randn(num_outputs, depth, generator=generator)
    return x, quantize_weight(weight, bits), num_outputs, torch.randn(num_outputs)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend, dtype, bits):
    for shape, rows in product(SHAPES, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33)):
        x, packed, num_outputs, bias = case(rows, *shape, bits, dtype)
        for given in (bias, None):
            actual = quantized_linear(x, packed, num_outputs, given, backend=backend)
            assert actual.dtype == dtype
            assert_right(actual, *expected_of(x, packed, num_outputs, given))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_are_exact(backend, bits):
    """Rows and weights with the scale 1, random and at the ends of their ranges."""
    least, most = LIMITS[bits]
    generator = np.random.default_rng(0)
    for depth, outputs in ((1, 1), (32, 16), (64, 5), (71, 33), (1000, 17)):
        ends = generator.choice([least, most], (outputs, depth))
        anything = generator.integers(least, most + 1, (outputs, depth))
        negative = np.full((outputs, depth), least if bits == 4 else -128)
        rows = generator.integers(-127, 128, (7, depth))
        rows[1] = generator.choice([-127, 127], depth)
        rows[2:4] = [[127], [-127]]
        rows[:, ::32] = 127  # in each group, so that its scale is 1
        x = torch.from_numpy(rows).float()
        for values in (ends, anything, negative, 0 * ends + most):
            packed = packed_by_hand(values, np.ones(values.shape), bits)
            expected = torch.from_numpy(rows @ values.T)
            assert expected.abs().max() <= 2**24
            actual = quantized_linear(x, packed, outputs, backend=backend)
            assert torch.equal(actual, expected.float()), (depth, outputs)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_group_has_its_own_scales(backend, bits):
    """Powers of two, so that sums are exact."""
    outputs, depth = 33, 200
    generator = np.random.default_rng(1)
    values = generator.integers(*LIMITS[bits], (outputs, depth), endpoint=True)
    powers = generator.integers(-2, 3, (outputs, 7)).repeat(32, axis=1)[:, :depth]
    signs = generator.choice([-1.0, 1.0], (outputs, 7)).repeat(32, axis=1)[:, :depth]
    scales = signs * 2.0**powers
    rows = generator.integers(-15, 16, (6, depth)).astype(np.float64)
    rows[:, ::32] = 127
    rows *= 2.0 ** generator.integers(-1, 2, (6, 7)).repeat(32, axis=1)[:, :depth]
    packed = packed_by_hand(values, scales, bits)
    expected = torch.from_numpy(rows @ (scales * values).T)
    x = torch.from_numpy(rows).float()
    assert torch.equal(quantized_linear(x, packed, outputs, backend=backend).double(), expected)


@pytest.mark.parametrize("bits", BITS)
def test_instruction_sets_agree(bits):
    if INSTRUCTION_SETS == ["none"]:
        pytest.skip("fastspec_kernels._cpu is not built")
    x, packed, num_outputs, bias = case(6, 37, 333, bits)
    found = []
    for name in INSTRUCTION_SETS:
        torch.ops.fastspec.use_cpu_instruction_set(name)  # the fixture restores it
        found.append(quantized_linear(x, packed, num_outputs, bias))
    _, error = expected_of(x, packed, num_outputs, bias)
    for out in found:
        assert ((out - found[0]).abs() <= 2 * error).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_rows_bits_do_not_depend_on_the_call(dtype, bits, restore_threads):
    for shape in [*SHAPES, (520, 1000)]:
        x, packed, num_outputs, bias = case(13, *shape, bits, dtype)
        alone = torch.cat([quantized_linear(row[None], packed, num_outputs, bias) for row in x])
        for threads, count in product((1, 2, 3), (1, 2, 3, 4, 5, 7, 13)):
            torch.set_num_threads(threads)
            out = quantized_linear(x[:count], packed, num_outputs, bias)
            assert torch.equal(out, alone[:count]), (shape, threads, count)


def test_leading_dimensions():
    x, packed, num_outputs, bias = case(6, 10, 40, 4)
    expected = quantized_linear(x, packed, num_outputs, bias)
    stacked = quantized_linear(x.view(2, 3, 40), packed, num_outputs, bias)
    assert torch.equal(stacked, expected.view(2, 3, 10))
    assert torch.equal(quantized_linear(x[0], packed, num_outputs, bias), expected[0])


def surrounded(tensor: torch.Tensor, poison, before: int) -> torch.Tensor:
    """The same values in the midst of others, `before` elements after an aligned address."""
    memory = torch.full((tensor.numel() + before + 64,), poison, dtype=tensor.dtype)
    inside = memory[before : before + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_around_the_tensors_counts(backend, dtype, bits):
    """Bytes of 255 are scales that are NaN; nothing needs to be aligned."""
    for shape, rows in product(SHAPES, (1, 5)):
        x, packed, num_outputs, bias = case(rows, *shape, bits, dtype)
        expected = quantized_linear(x, packed, num_outputs, bias, backend=backend)
        for before in (1, 3):
            given = surrounded(x, torch.nan, before), surrounded(packed, 255, before)
            bias_there = surrounded(bias, torch.nan, before)
            out = quantized_linear(*given, num_outputs, bias_there, backend=backend)
            assert torch.equal(out, expected), shape


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_padding_does_not_count(backend, bits):
    """Neither all of the outputs that pad a tile, nor the values that pad the inputs."""
    for num_outputs, depth in ((1, 1), (17, 70), (5, 33), (40, 127)):
        x, packed, _, bias = case(5, num_outputs, depth, bits)
        values, scales = unpacked(packed, num_outputs, depth)
        all_values = np.full((-(-num_outputs // 16) * 16, -(-depth // 64) * 64), 7)
        all_scales = np.full(all_values.shape, np.nan)
        all_values[:num_outputs, :depth] = values
        groups = slice(0, -(-depth // 32) * 32)
        all_scales[:num_outputs] = 0.0
        all_scales[:num_outputs, groups] = scales[:, ::32].repeat(32, axis=1)
        poisoned = packed_by_hand(all_values, all_scales, bits)
        assert not torch.equal(poisoned, packed)
        expected = quantized_linear(x, packed, num_outputs, bias, backend=backend)
        out = quantized_linear(x, poisoned, num_outputs, bias, backend=backend)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_a_row_that_is_not_finite_is_nan(backend, dtype, bad, bits):
    for depth, rows in product((1, 40, 95, 130), (1, 3, 4, 6)):
        x, packed, num_outputs, bias = case(rows, 20, depth, bits, dtype)
        clean = quantized_linear(x, packed, num_outputs, bias, backend=backend)
        assert clean.isfinite().all()
        for place in {0, depth // 2, depth - 1}:
            changed = x.clone()
            changed[rows // 2, place] = bad
            out = quantized_linear(changed, packed, num_outputs, bias, backend=backend)
            assert out[rows // 2].isnan().all()
            clean[rows // 2] = 0
            assert torch.equal(out.nan_to_num(0.0), clean), (depth, rows, place)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros(backend, bits):
    x, packed, num_outputs, bias = case(5, 20, 100, bits)
    x[1], x[3] = 0.0, -0.0
    out = quantized_linear(x, packed, num_outputs, bias, backend=backend)
    assert torch.equal(out[1::2], bias.expand(2, 20))
    nothing = quantize_weight(torch.zeros(20, 100), bits)
    out = quantized_linear(x, nothing, num_outputs, bias, backend=backend)
    assert torch.equal(out, bias.expand(5, 20))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_and_huge_rows(backend, bits):
    """Groups below 1e-30 are zero, also subnormal ones; the largest numbers keep their ratios."""
    x, _, num_outputs, _ = case(6, 20, 100, bits)
    x /= x.abs().amax(1, keepdim=True)
    factors = torch.tensor([1e-45, 1e-39, 9e-31, 1.1e-30, 1e30, 3.4e38])
    x *= factors[:, None]
    assert x.isfinite().all()
    packed_small = quantize_weight(torch.randn(20, 100) * 1e-3, bits)
    out = quantized_linear(x, packed_small, num_outputs, backend=backend)
    assert out.isfinite().all()
    assert not out[:3].any()
    expected, error = expected_of(x, packed_small, num_outputs)
    assert_right(out, expected, error)
    x[5] = 0.0
    x[5, 3] = torch.finfo(torch.float32).max
    out = quantized_linear(x[5:], packed_small, num_outputs, backend=backend)
    assert_right(out, *expected_of(x[5:], packed_small, num_outputs))


@pytest.mark.parametrize("bits", BITS)
def test_rounding_of_rows_is_to_nearest_even(bits):
    """Values in the middle between two multiples."""
    x = torch.zeros(2, 32)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5])
    x[1, :5] = torch.tensor([-127.0, 0.75, 1.25, -1.5, 126.5])
    identity = np.eye(32, dtype=np.int64)
    packed = packed_by_hand(identity, np.ones((32, 32)), bits)
    expected = torch.tensor([[127.0, 0, 2, 0, -2], [-127.0, 1, 1, -2, 126]])
    for backend in BACKENDS:
        out = quantized_linear(x, packed, 32, backend=backend)
        assert torch.equal(out[:, :5], expected)


def relative_error(weight: torch.Tensor, bits: int) -> float:
    values, scales = unpacked(quantize_weight(weight, bits), *weight.shape)
    assert values.min() >= LIMITS[bits][0]
    assert values.max() <= LIMITS[bits][1]
    exact = weight.double().numpy()
    return float(np.linalg.norm(values * scales - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(("bits", "most"), [(4, 0.1), (8, 0.007)])
def test_error_of_weights_is_bounded(bits, most):
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 512), (17, 100), (1, 4000)):
        weight = torch.randn(*shape, generator=generator)
        for factor in (1.0, 1e-3, 1e30, 1e-30):
            assert relative_error(weight * factor, bits) < most


@pytest.mark.parametrize("bits", BITS)
def test_error_of_each_weight_is_half_a_step(bits):
    """Of 8 bits; 4 bits may be further off at one end, where the scale fits the rest better."""
    weight = torch.randn(33, 100, generator=torch.Generator().manual_seed(1))
    values, scales = unpacked(quantize_weight(weight, bits), 33, 100)
    steps = np.abs(values * scales - weight.double().numpy()) / np.abs(scales)
    inside = (values > LIMITS[bits][0]) & (values < LIMITS[bits][1])
    assert steps[inside].max() < 0.501
    assert steps.max() < (0.8 if bits == 8 else 2.0)


@pytest.mark.parametrize("bits", BITS)
def test_multiples_of_a_scale_are_exact(bits):
    """With the greatest magnitude in each group, on either side."""
    generator = np.random.default_rng(2)
    least, most = LIMITS[bits]
    values = generator.integers(least, most + 1, (35, 192))
    values[:, ::32] = least
    scales = 2.0 ** generator.integers(-9, 9, (35, 6)) * generator.choice([1.0, 1.5], (35, 6))
    scales = (scales * generator.choice([-1.0, 1.0], (35, 6))).repeat(32, axis=1)
    packed = quantize_weight(torch.from_numpy(values * scales).float(), bits)
    found, found_scales = unpacked(packed, 35, 192)
    assert (found * found_scales == values * scales).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_format_is_the_documented_one(bits):
    """Padding included: zeros, with the scale zero."""
    weight = torch.randn(35, 100, generator=torch.Generator().manual_seed(3))
    weight[3, 32:64] = 0
    packed = quantize_weight(weight, bits)
    assert packed.shape == (3, 2, 64 + 128 * bits)
    assert packed.dtype == torch.uint8
    assert packed.is_contiguous()
    values, scales = unpacked(packed, 35, 100)
    assert not values[3, 32:64].any()
    assert not scales[3, 32:64].any()
    assert torch.equal(packed_by_hand(values, scales, bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_whatever_kind_of_weight_is_packed(bits):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    expected = quantize_weight(weight.float(), bits)
    parameter = torch.nn.Parameter(weight.float())
    for kind in (weight, weight.float().T.contiguous().T, parameter):
        found = quantize_weight(kind, bits)
        assert torch.equal(found, expected)
        assert not found.requires_grad
    half = torch.randn(4, 70).half()
    assert torch.equal(quantize_weight(half, bits), quantize_weight(half.float(), bits))
    long = torch.randn(4099 + 4096, 3)
    parts = [quantize_weight(part, bits) for part in (long[:4096], long[4096:])]
    assert torch.equal(quantize_weight(long, bits), torch.cat(parts))


@pytest.mark.parametrize("bits", BITS)
def test_huge_and_tiny_weights_stay_finite(bits):
    largest = torch.finfo(torch.float32).max
    for factor in (largest, 1e-37, 1e-40, 1e-45):
        weight = torch.linspace(-1, 1, 640).view(5, 128) * factor
        values, scales = unpacked(quantize_weight(weight, bits), 5, 128)
        assert np.isfinite(scales).all()
        error = np.abs(values * scales - weight.double().numpy()).max()
        assert error <= (0.13 if factor > 1e-38 else 1.0) * float(weight.abs().max())
    same = torch.full((1, 32), largest)
    values, scales = unpacked(quantize_weight(same, bits), 1, 32)
    assert (np.abs(values * scales / largest - 1) < 0.005).all()


@pytest.mark.parametrize(
    ("weight", "bits", "message"),
    [
        (None, 4, "weight: expected a tensor, got NoneType"),
        (torch.ones(3), 4, r"weight: expected shape \[\*, \*\], got \[3\]"),
        (torch.ones(3, 4, dtype=torch.float64), 4, "weight: expected float32 or bfloat16 or float"),
        (torch.ones(0, 4), 4, "weight: expected rows of at least one value, got 0"),
        (torch.ones(4, 0), 8, "weight: expected rows of at least one value, got 0"),
        (torch.ones(3, 4).to_sparse(), 4, "weight: expected a dense tensor"),
        (torch.tensor([[1.0, torch.nan]]), 4, "weight: expected finite values"),
        (torch.tensor([[1.0, -torch.inf]]), 8, "weight: expected finite values"),
        *((torch.ones(3, 4), bits, "bits: expected 4 or 8, got ") for bits in (5, 4.0, "8", None)),
        *((torch.ones(3, 4), bits, "bits: expected 4 or 8, got ") for bits in ([4], True, 2**70)),
    ],
    ids=str,
)
def test_errors_of_weights(weight, bits, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        quantize_weight(weight, bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, n, b: (None, w, n, b), "input: expected a tensor"),
        (lambda x, w, n, b: (x.double(), w, n, b), "input: expected float32 or bfloat16 or float1"),
        (lambda x, w, n, b: (x[:, :0], w, n, b), "input: expected rows of at least one value"),
        (lambda x, w, n, b: (x[0, 0], w, n, b), "input: expected rows of at least one value"),
        (lambda x, w, n, b: (x.T.contiguous().T, w, n, b), "input: "),
        (lambda x, w, n, b: (x.to("meta"), w, n, b), "input: expected a tensor on cpu"),
        (lambda x, w, n, b: (x[:, :64].contiguous(), w, n, b), "weight: expected shape"),
        (lambda x, w, n, b: (x, None, n, b), "weight: expected a tensor"),
        (lambda x, w, n, b: (x, w.to(torch.int8), n, b), "weight: expected uint8, got int8"),
        (lambda x, w, n, b: (x, w[0], n, b), r"weight: expected shape \[2, 2, \*\]"),
        (lambda x, w, n, b: (x, w[:1], n, b), r"weight: expected shape \[2, 2, \*\]"),
        (lambda x, w, n, b: (x, w[:, :1].contiguous(), n, b), r"weight: expected shape \[2, 2, "),
        (lambda x, w, n, b: (x, w[..., 1:].contiguous(), n, b), "weight: expected blocks of 576 o"),
        (lambda x, w, n, b: (x, w[..., :64].contiguous(), n, b), "weight: expected blocks of 576"),
        (lambda x, w, n, b: (x, w[..., :0], n, b), "weight: expected blocks of 576 or 1088 bytes"),
        (lambda x, w, n, b: (x, w.transpose(0, 1), n, b), "weight: "),
        (lambda x, w, n, b: (x, w[:, :1].expand(2, 2, -1), n, b), "weight: "),
        (lambda x, w, n, b: (x, w, 0, None), "num_outputs: expected an int >= 1, got 0"),
        (lambda x, w, n, b: (x, w, -1, None), "num_outputs: expected an int >= 1, got -1"),
        (lambda x, w, n, b: (x, w, True, None), "num_outputs: expected an int >= 1, got True"),
        (lambda x, w, n, b: (x, w, 20.0, None), "num_outputs: expected an int >= 1, got 20.0"),
        (lambda x, w, n, b: (x, w, 33, None), r"weight: expected shape \[3, 2, \*\]"),
        (lambda x, w, n, b: (x, w, 16, None), r"weight: expected shape \[1, 2, \*\]"),
        (lambda x, w, n, b: (x, w, 2**63 - 1, None), "weight: expected shape"),
        (lambda x, w, n, b: (x, w, n, b[:-1]), r"bias: expected shape \[20\], got \[19\]"),
        (lambda x, w, n, b: (x, w, n, b.bfloat16()), "bias: expected float32, got bfloat16"),
        (lambda x, w, n, b: (x, w, n, b.to("meta")), "bias: expected a tensor on cpu"),
        (lambda x, w, n, b: (x, w, n, b.repeat(2)[::2]), "bias: "),
    ],
)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors(change, message, bits, backend):
    with pytest.raises(ValueError, match=f"^{message}"):
        quantized_linear(*change(*case(3, 20, 100, bits)), backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "triton", "gpu"])
def test_errors_of_backends(backend):
    with pytest.raises(ValueError, match=r"^backend: .*reference"):
        quantized_linear(*case(3, 20, 100, 4), backend=backend)


@pytest.mark.parametrize("bits", BITS)
def test_errors_of_the_kernel_itself(bits):
    """Sizes of weights are checked before they are read, also where the public op is passed by."""
    if "cpu" not in BACKENDS:
        pytest.skip("fastspec_kernels._cpu is not built")
    kernel = torch.ops.fastspec.quantized_linear.default
    x, packed, num_outputs, bias = case(3, 20, 100, bits)
    kernel(x, packed, num_outputs, bias)
    for wrong in (
        (x, packed, 2**63 - 1, None),
        (x, packed, -(2**63), None),
        (x, packed, 33, None),
        (x, packed[:1], num_outputs, bias),
        (x, packed[:, :1].contiguous(), num_outputs, bias),
        (x, packed[..., : 64 + 128 * bits - 1].contiguous(), num_outputs, bias),
        (x, packed[..., :0], num_outputs, bias),
        (x, packed.view(torch.int8), num_outputs, bias),
        (x, packed.flatten(), num_outputs, bias),
        (x, packed, num_outputs, bias[:-1]),
        (x, packed, num_outputs, bias.double()),
        (x[:, :0], packed, num_outputs, bias),
        (x[0, 0], packed, num_outputs, bias),
        (x.double(), packed, num_outputs, bias),
        (x.T.contiguous().T, packed, num_outputs, bias),
        (packed, packed, num_outputs, bias),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            kernel(*wrong)


def test_registration():
    for dtype, bits in product(ROUNDING, BITS):
        given = case(3, 20, 100, bits, dtype)
        torch.library.opcheck(torch.ops.fastspec.quantized_linear, given)  # the fake, too
