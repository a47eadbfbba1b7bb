"""store_kv writes the slots it is told to and leaves every other bit alone."""

import pytest
import torch

from fastspec_kernels import store_kv

from .cases import backends_of, device_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
backends = pytest.mark.parametrize("backend", backends_of("store_kv"))


def caches(num_blocks=5, block_size=4, num_heads=2, head_size=8, dtype=torch.float32):
    shape = (num_blocks, block_size, num_heads, head_size)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, -7.0, dtype=dtype)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int8)


def check(backend, key, value, key_cache, value_cache, slots):
    """Store, and compare with a loop over the tokens."""
    device = device_of(backend)
    wanted = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            for cache, source in zip(wanted, (key, value), strict=True):
                cache[slot // cache.shape[1], slot % cache.shape[1]] = source[token]
    moved = [cache.to(device) for cache in (key_cache, value_cache)]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    assert store_kv(key.to(device), value.to(device), *moved, mapping, backend=backend) is None
    for cache, expected in zip(moved, wanted, strict=True):
        assert torch.equal(bits(cache), bits(expected))


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "slots", [[], [-1], [0], [19, 3, -1, 7], list(range(20)), [-1, -1, 4]], ids=str
)
def test_writes_its_slots_only(backend, dtype, slots):
    key, value = torch.randn(2, len(slots), 2, 8).to(dtype)
    check(backend, key, value, *caches(dtype=dtype), slots)


@backends
@pytest.mark.parametrize(("num_heads", "head_size", "block_size"), [(1, 1, 1), (3, 5, 33)])
def test_odd_sizes(backend, num_heads, head_size, block_size):
    key, value = torch.randn(2, 3, num_heads, head_size)
    shape = {"num_heads": num_heads, "head_size": head_size, "block_size": block_size}
    check(backend, key, value, *caches(**shape), [4, 0, 2])


@backends
def test_many_tokens(backend):
    """Enough bytes for several threads."""
    key, value = torch.randn(2, 600, 2, 64)
    slots = torch.randperm(640)[:600].tolist()
    check(backend, key, value, *caches(num_blocks=40, block_size=16, head_size=64), slots)


@backends
def test_strided_tokens(backend):
    """Views as models hand them over: heads first, or a slice of one fused projection."""
    heads_first = torch.randn(2, 3, 8).transpose(0, 1)
    fused = torch.randn(3, 6, 10)[:, 2:4, 1:9]
    check(backend, heads_first, fused, *caches(), [5, 6, 7])


@backends
def test_interleaved_caches(backend):
    both = torch.zeros(5, 2, 4, 2, 8)
    key, value = torch.randn(2, 3, 2, 8)
    check(backend, key, value, *both.unbind(1), [5, 6, 7])


@backends
@pytest.mark.parametrize("slot", [-2, 20, 2**31, -(2**63)])
def test_a_slot_outside_the_cache_writes_nothing(backend, slot):
    if device_of(backend) != "cpu":
        pytest.skip("slots are read back on the CPU only")
    key, value = torch.randn(2, 2, 2, 8)
    key_cache, value_cache = caches()
    mapping = torch.tensor([3, slot])
    with pytest.raises(ValueError, match=r"^slot_mapping"):
        store_kv(key, value, key_cache, value_cache, mapping, backend=backend)
    assert key_cache.isnan().all()
    assert (value_cache == -7).all()


def rotated(key, cos, sin):
    """Transformers' own formula, in float64."""
    size = cos.shape[1]
    part = key[..., :size].double()
    swapped = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], dim=-1)
    turned = part * cos.double()[:, None] + swapped * sin.double()[:, None]
    return torch.cat([turned, key[..., size:].double()], dim=-1)


def rotary(num_tokens, size, dtype, equal_halves=True):
    angle = torch.randn(num_tokens, size) * 5
    if equal_halves:
        angle[:, size // 2 :] = angle[:, : size // 2]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "size"), [(8, 8), (8, 2), (80, 32), (64, 64), (5, 4)])
@pytest.mark.parametrize("same_dtype", [False, True])
@pytest.mark.parametrize("equal_halves", [False, True])
def test_rotation(backend, dtype, head_size, size, same_dtype, equal_halves):
    """The first values of each key turn, all else is copied; values never turn."""
    key, value = torch.randn(2, 6, 2, head_size).to(dtype)
    cos, sin = rotary(6, size, dtype if same_dtype else torch.float32, equal_halves)
    slots = torch.tensor([3, -1, 0, 19, 4, 7])
    device = device_of(backend)
    tensors = [tensor.to(device) for tensor in (key, value, *caches(head_size=head_size))]
    tensors[2:] = [cache.to(dtype) for cache in tensors[2:]]
    factors = {"cos": cos.to(device), "sin": sin.to(device)}
    store_kv(*tensors, slots.to(device), **factors, backend=backend)
    key_cache, value_cache = (cache.flatten(0, 1).cpu() for cache in tensors[2:])
    kept = slots >= 0
    expected = rotated(key, cos, sin)[kept]
    tolerance = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    stored = key_cache[slots[kept]]
    torch.testing.assert_close(stored.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(bits(stored[..., size:]), bits(key[kept][..., size:]))
    assert torch.equal(bits(value_cache[slots[kept]]), bits(value[kept]))
    others = torch.ones(20, dtype=torch.bool).index_fill(0, slots[kept], False)
    assert key_cache[others].isnan().all()
    assert (value_cache[others] == -7).all()


@backends
def test_rotation_of_views(backend):
    """Heads first, and factors with padded rows."""
    key = torch.randn(2, 3, 8).transpose(0, 1)
    cos, sin = (factor[:, 1:7] for factor in rotary(3, 9, torch.float32, False))
    key_cache, value_cache = caches()
    slots = torch.tensor([5, 6, 7])
    device = device_of(backend)
    moved = [tensor.to(device) for tensor in (key, key, key_cache, value_cache, slots, cos, sin)]
    store_kv(*moved[:5], cos=moved[5], sin=moved[6], backend=backend)
    stored = moved[2].flatten(0, 1)[5:8].cpu()
    torch.testing.assert_close(stored.double(), rotated(key, cos, sin), atol=5e-7, rtol=5e-7)


WRONG_ROTATIONS = [
    ("cos", torch.ones(2, 3), torch.ones(2, 3)),
    ("cos", torch.ones(2, 10), torch.ones(2, 10)),
    ("cos", torch.ones(2, 0), torch.ones(2, 0)),
    ("cos", torch.ones(1, 4), torch.ones(1, 4)),
    ("cos", torch.ones(2, 4).half(), torch.ones(2, 4).half()),
    ("cos", torch.ones(2, 8)[:, ::2], torch.ones(2, 4)),
    ("cos", torch.ones(2, 4), None),
    ("cos", None, torch.ones(2, 4)),
    ("cos", 1.0, torch.ones(2, 4)),
    ("sin", torch.ones(2, 4), torch.ones(2, 2)),
    ("sin", torch.ones(2, 4), torch.ones(2, 4).double()),
    ("sin", torch.ones(2, 4), torch.ones(2, 8)[:, ::2]),
]


@backends
@pytest.mark.parametrize(("name", "cos", "sin"), WRONG_ROTATIONS)
def test_wrong_rotations(backend, name, cos, sin):
    key, value = torch.randn(2, 2, 2, 8)
    tensors = (key, value, *caches(), torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=f"^{name}"):
        store_kv(*tensors, cos=cos, sin=sin, backend=backend)


WRONG = {
    "key": [
        lambda key: key.tolist(),
        lambda key: key.double(),
        lambda key: key[:1],
        lambda key: key[:, :1],
        lambda key: key[0],
        lambda key: key.repeat_interleave(2, 2)[:, :, ::2],
        lambda key: key.to("meta"),
    ],
    "value": [lambda value: value.half(), lambda value: value[:, :, :4]],
    "key_cache": [
        lambda cache: None,
        lambda cache: cache.double(),
        lambda cache: cache[0],
        lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2),
        lambda cache: cache[:1].expand_as(cache),
    ],
    "value_cache": [lambda cache: cache.half(), lambda cache: cache[:1]],
    "slot_mapping": [
        lambda slots: slots.int(),
        lambda slots: slots[None],
        lambda slots: slots.repeat_interleave(2)[::2],
    ],
}
CASES = [(name, change) for name, changes in WRONG.items() for change in changes]


@backends
@pytest.mark.parametrize(("name", "change"), CASES)
def test_wrong_arguments(backend, name, change):
    key, value = torch.randn(2, 2, 2, 8)
    key_cache, value_cache = caches()
    good = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    good["slot_mapping"] = torch.tensor([3, 4])
    with pytest.raises(ValueError, match=f"^{name}"):
        store_kv(**{**good, name: change(good[name])}, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    key, value = torch.randn(2, 3, 2, 8).to(dtype)
    arguments = (key, value, *caches(dtype=dtype), torch.tensor([3, -1, 4]), None, None, 1.0, 1.0)
    torch.library.opcheck(torch.ops.fastspec.store_kv.default, arguments)
    arguments = (*arguments[:5], *rotary(3, 4, dtype), 1.0, 1.0)
    torch.library.opcheck(torch.ops.fastspec.store_kv.default, arguments)
