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
    arguments = (key, value, *caches(dtype=dtype), torch.tensor([3, -1, 4]), None, None)
    torch.library.opcheck(torch.ops.fastspec.store_kv.default, arguments)
