"""Caches that hold 8 bits of each key and value: what is stored, and what attention makes of it."""

import pytest
import torch
from torch import Tensor

from fastspec_kernels import backend as dispatch
from fastspec_kernels import cross_attention, library, store_kv, tree_attention

from .cases import backends_of, device_of
from .paged import Paged, attention_backends, in_float8, paged
from .test_store_kv import rotary
from .test_tree_attention_masks import trees

FLOAT8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SCALES = [{}, {"key_scale": 0.5, "value_scale": 3.0}]


def takes_float8(name: str) -> bool:
    return name in ("reference", "triton")


backends = pytest.mark.parametrize("backend", list(filter(takes_float8, backends_of("store_kv"))))
attending = pytest.mark.parametrize(
    "backend", list(filter(takes_float8, attention_backends("tree_attention")))
)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def numbers() -> Tensor:
    """Every number >= 0 that a byte stands for, ascending; number i has code i."""
    return torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()


def store(
    backend: str, key: Tensor, value: Tensor, slots: list[int], num_slots: int, **options
) -> list[Tensor]:
    """The bytes of both caches, of blocks of one slot, [num_slots, G, D]; 3 in all others."""
    device = device_of(backend)
    shape = (num_slots, 1, *key.shape[1:])
    caches = [torch.full(shape, 3, dtype=torch.uint8, device=device) for _ in range(2)]
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    arguments = [tensor.to(device) for tensor in (key, value)]
    views = [cache.view(FLOAT8) for cache in caches]
    mapping = torch.tensor(slots, device=device)
    store_kv(*arguments, *views, mapping, backend=backend, **options)
    return [cache[:, 0].cpu() for cache in caches]


def codes(backend: str, values: Tensor, **options) -> Tensor:
    """What is stored of some numbers, as keys; with their signs changed, as values."""
    rows = values.view(1, 1, -1)
    key, value = store(backend, rows, -rows, [0], 1, **options)
    assert torch.equal(key ^ 0x80, value)
    return key.flatten()


@backends
def test_numbers_are_stored_as_they_are(backend):
    assert codes(backend, numbers()).tolist() == list(range(127))


@backends
def test_what_lies_between_goes_to_the_nearest_and_ties_to_even(backend):
    below, above = numbers()[:-1], numbers()[1:]
    middle = (below + above) / 2
    even = [code + code % 2 for code in range(126)]
    assert codes(backend, middle).tolist() == even
    assert codes(backend, torch.nextafter(middle, below)).tolist() == list(range(126))
    assert codes(backend, torch.nextafter(middle, above)).tolist() == list(range(1, 127))


@backends
@dtypes
def test_too_large_becomes_the_largest(backend, dtype):
    large = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 6e4, torch.inf]).to(dtype)
    assert codes(backend, large).tolist() == [0x7E] * 7
    nan = torch.full((1, 1, 2), torch.nan, dtype=dtype)
    for stored in store(backend, nan, nan, [0], 1):
        assert stored.flatten().bitwise_and(0x7F).tolist() == [0x7F] * 2


@backends
@dtypes
def test_scales_divide(backend, dtype):
    values = (torch.randn(500) * 100).to(dtype)
    scaled = store(
        backend, values.view(1, 2, 250), -values.view(1, 2, 250), [0], 1, key_scale=0.3,
        value_scale=7,
    )  # fmt: skip
    for stored, scale, sign in zip(scaled, (0.3, 7), (1, -1), strict=True):
        expected = codes(backend, sign * values.float() / torch.tensor(scale))
        assert torch.equal(stored.flatten(), expected)


@backends
@dtypes
@pytest.mark.parametrize("head_size", [5, 64, 80, 128])
def test_writes_its_slots_only(backend, dtype, head_size):
    key, value = torch.randn(2, 4, 3, head_size).to(dtype)
    stored = store(backend, key, value, [5, -1, 0, 2], 7)
    for rows, cache in zip((key, value), stored, strict=True):
        assert (cache[[1, 3, 4, 6]] == 3).all()
        expected = rows[[0, 2, 3]].to(FLOAT8).view(torch.uint8)
        assert torch.equal(cache[[5, 0, 2]], expected)


@backends
@dtypes
def test_keys_turn_before_they_are_stored(backend, dtype):
    key, value = torch.randn(2, 3, 2, 80).to(dtype)
    cos, sin = rotary(3, 32, torch.float32, False)
    device = device_of(backend)
    plain = [torch.zeros(3, 1, 2, 80, dtype=dtype, device=device) for _ in range(2)]
    tensors = [tensor.to(device) for tensor in (key, value)]
    slots = torch.arange(3, device=device)
    factors = {"cos": cos.to(device), "sin": sin.to(device)}
    store_kv(*tensors, *plain, slots, **factors, backend=backend)
    turned = plain[0][:, 0].cpu()
    stored, _ = store(backend, key, value, [0, 1, 2], 3, cos=cos, sin=sin, key_scale=0.5)
    again, _ = store(backend, turned, value, [0, 1, 2], 3, key_scale=0.5)
    assert torch.equal(stored, again)


@backends
def test_a_round_trip_changes_nothing(backend):
    rows = torch.randn(6, 2, 64) * 5
    first, _ = store(backend, rows, rows, list(range(6)), 6)
    back = first.view(FLOAT8).bfloat16()
    second, _ = store(backend, back, back, list(range(6)), 6)
    assert torch.equal(first, second)


def dequantised(case: Paged, key_scale: float = 1.0, value_scale: float = 1.0) -> list[Tensor]:
    """The tensors of a float8 case as a float32 one."""
    query, keys, values, *others = case.tensors
    return [query.float(), keys.float() * key_scale, values.float() * value_scale, *others]


def check(case: Paged, op, backend: str, scales: dict, **options) -> None:
    """As attention in float32 over what the caches stand for."""
    case = in_float8(case)
    device = device_of(backend)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    out = op(*case.to(device).tensors, backend=backend, **scales, **moved)
    expected = op(*dequantised(case, **scales), backend="reference", **options)
    if options.get("return_logsumexp"):
        torch.testing.assert_close(out[1].cpu(), expected[1], atol=2e-5, rtol=2e-6)
        out, expected = out[0], expected[0]
    assert out.dtype == case.query.dtype
    tolerance = TOLERANCE[out.dtype] * scales.get("value_scale", 1.0)
    torch.testing.assert_close(out.float().cpu(), expected, atol=tolerance, rtol=tolerance)


@attending
@dtypes
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("group", "head_size"), [(4, 128), (1, 64), (3, 80), (2, 5)])
def test_chains(backend, dtype, scales, group, head_size):
    case = paged([70, 9, 0, 130], [3, 9, 0, 1], group=group, head_size=head_size, dtype=dtype)
    check(case, tree_attention, backend, scales, return_logsumexp=True)


@attending
@pytest.mark.parametrize("scales", SCALES)
def test_trees_windows_caps_and_sinks(backend, scales):
    case = paged([90, 12, 600], [4, 4, 4], dtype=torch.bfloat16)
    options = {"softcap": 5.0, "sinks": torch.tensor([-2.0, 0.0, 3.0, 1.0]), "sliding_window": 50}
    check(case, tree_attention, backend, scales, ancestor_mask=trees(3, 4), **options)


@attending
@pytest.mark.parametrize("scales", SCALES)
def test_cross_attention(backend, scales):
    check(paged([600, 0, 3, 64], [2, 2, 40, 1]), cross_attention, backend, scales)


@attending
def test_nan_reaches_the_rows_that_see_it(backend):
    case = in_float8(paged([40, 20], [3, 2]))
    block = case.block_table[1, 0]
    case.value_cache.view(torch.uint8)[block, 4, 0, 7] = 0x7F
    out = tree_attention(*case.to(device_of(backend)).tensors, backend=backend)
    assert out[3:, :2, 7].isnan().all()
    assert int(out.isnan().sum()) == 4


WRONG_SCALES = [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39]


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("scale", WRONG_SCALES)
def test_wrong_scales(name, scale):
    case = in_float8(paged([20, 3], [2, 1]))
    for op in (tree_attention, cross_attention):
        with pytest.raises(ValueError, match=f"^{name}: expected a positive"):
            op(*case.tensors, **{name: scale})
    rows, slots = torch.randn(1, 2, 16), torch.tensor([0])
    with pytest.raises(ValueError, match=f"^{name}: expected a positive"):
        store_kv(rows, rows, *case.tensors[1:3], slots, **{name: scale})


@pytest.mark.parametrize("backend", backends_of("store_kv"))
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_other_caches_have_no_scales(backend, name):
    case = paged([20, 3], [2, 1])
    for op in (tree_attention, cross_attention):
        with pytest.raises(ValueError, match=f"^{name}: expected 1.0"):
            op(*case.tensors, **{name: 2.0}, backend=backend)
    rows, slots = torch.randn(1, 2, 16), torch.tensor([0])
    with pytest.raises(ValueError, match=f"^{name}: expected 1.0"):
        store_kv(rows, rows, *case.tensors[1:3], slots, **{name: 2.0}, backend=backend)


def test_wrong_dtypes():
    rows, slots = torch.randn(1, 2, 16), torch.tensor([0])
    case = in_float8(paged([20, 3], [2, 1]))
    query, keys, values, *others = case.tensors
    with pytest.raises(ValueError, match=r"^key:"):
        store_kv(rows.to(FLOAT8), rows, keys, values, slots)
    with pytest.raises(ValueError, match=r"^value:"):
        store_kv(rows, rows.half(), keys, values, slots)
    with pytest.raises(ValueError, match=r"^value_cache"):
        store_kv(rows, rows, keys, values.float(), slots)
    with pytest.raises(ValueError, match=r"^query:"):
        tree_attention(query.to(FLOAT8), keys, values, *others)
    with pytest.raises(ValueError, match=r"^key_cache"):
        tree_attention(query, keys.view(torch.float8_e5m2), values, *others)


@pytest.mark.skipif(not library.has_kernel("store_kv", "cpu"), reason="_cpu is not built")
def test_compiled_kernels_are_passed_by():
    """By default another backend runs; asked for by name, the compiled one says what there is."""
    for op in ("store_kv", "tree_attention", "cross_attention"):
        assert "cpu" not in dispatch.backends_of(op, CPU, FLOAT8)
        with pytest.raises(ValueError, match=r"float8_e4m3fn; available: .*reference"):
            dispatch.resolve(op, "cpu", CPU, FLOAT8)
    assert dispatch.resolve("compact_kv", "cpu", CPU, FLOAT8) == "cpu"
    case = in_float8(paged([20, 3], [2, 1]))
    with pytest.raises(ValueError, match=r"^backend: 'cpu' cannot run tree_attention"):
        tree_attention(*case.tensors, backend="cpu")


@pytest.mark.skipif(not library.has_kernel("store_kv", "cpu"), reason="_cpu is not built")
def test_the_kernels_themselves_refuse():
    case = paged([20, 3], [2, 1])
    rows, slots = torch.randn(1, 2, 16), torch.tensor([0])
    ops = torch.ops.fastspec
    for scales in ((2.0, 1.0), (1.0, 2.0)):
        with pytest.raises((RuntimeError, ValueError)):
            ops.store_kv.default(rows, rows, *case.tensors[1:3], slots, None, None, *scales)
    with pytest.raises((RuntimeError, ValueError)):
        ops.cross_attention.default(*case.tensors, 1.0, 2.0)
    float8 = in_float8(case)
    with pytest.raises((RuntimeError, ValueError)):
        ops.store_kv.default(rows, rows, *float8.tensors[1:3], slots, None, None, 1.0, 1.0)
    with pytest.raises((RuntimeError, ValueError)):
        ops.tree_attention.default(*float8.tensors, 1.0, 0, 0.0, None, None, False, 1.0)
