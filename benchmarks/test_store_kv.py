"""What one step writes to the cache and moves in it."""

import pytest
import torch

from fastspec_kernels import compact_kv, store_kv

from .inputs import BACKENDS

TOKENS = [1, 5, 320]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_store_kv(compare, num_tokens, backend):
    key, value = torch.randn(2, num_tokens, 8, 128)
    key_cache, value_cache = torch.zeros(2, 64, 16, 8, 128)
    slots = torch.randperm(64 * 16)[:num_tokens]
    store_kv(key, value, key_cache, value_cache, slots, backend=backend)
    assert torch.equal(key_cache.flatten(0, 1)[slots], key)
    assert torch.equal(value_cache.flatten(0, 1)[slots], value)

    def with_torch():
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)

    compare(
        {
            "op": "store_kv",
            "backend": backend,
            "shape": {"T": num_tokens, "G": 8, "D": 128},
            "dtype": "float32",
        },
        ours=lambda: store_kv(key, value, key_cache, value_cache, slots, backend=backend),
        floor=lambda: (key.clone(), value.clone()),
        peer=with_torch,
    )


def rotate(key, cos, sin):
    """The rotary embedding as transformers' models apply it."""
    first, second = key.chunk(2, dim=-1)
    return key * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_store_rotated_kv(compare, num_tokens, backend):
    key, value = torch.randn(2, num_tokens, 8, 128)
    angle = torch.randn(num_tokens, 64).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    key_cache, value_cache = torch.zeros(2, 64, 16, 8, 128)
    slots = torch.randperm(64 * 16)[:num_tokens]

    def store():
        store_kv(key, value, key_cache, value_cache, slots, cos=cos, sin=sin, backend=backend)

    store()
    torch.testing.assert_close(key_cache.flatten(0, 1)[slots], rotate(key, cos, sin))
    assert torch.equal(value_cache.flatten(0, 1)[slots], value)

    def with_torch():
        key_cache.flatten(0, 1).index_copy_(0, slots, rotate(key, cos, sin))
        value_cache.flatten(0, 1).index_copy_(0, slots, value)

    compare(
        {
            "op": "store_kv",
            "backend": backend,
            "shape": {"T": num_tokens, "G": 8, "D": 128, "R": 128},
            "dtype": "float32",
        },
        ours=store,
        floor=lambda: (key.clone(), value.clone()),
        peer=with_torch,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "num_layers"), [(1, 32), (8, 32)])
def test_compact_kv(compare, batch, num_layers, backend):
    """Four accepted nodes of a tree of 16, each one place away from where it belongs or more."""
    shape = (num_layers, 2 * batch, 16, 8, 128)
    key_caches, value_caches = torch.randn(2, *shape)
    table = torch.randperm(2 * batch).to(torch.int32).view(batch, 2)
    prefix_lens = torch.full((batch,), 9, dtype=torch.int32)
    path = torch.tensor([[2, 5, 8, 13]] * batch, dtype=torch.int32)
    accepted_len = torch.full((batch,), 4, dtype=torch.int32)
    indices = (table, prefix_lens, path, accepted_len)
    expected = [key_caches.clone(), value_caches.clone()]
    compact_kv(*expected, *indices, backend="reference")
    compact_kv(key_caches, value_caches, *indices, backend=backend)
    assert torch.equal(key_caches, expected[0])
    assert torch.equal(value_caches, expected[1])
    places = [9 + path.long(), 10 + torch.arange(4).expand(batch, 4)]
    source, target = (
        (table.long().gather(1, place // 16) * 16 + place % 16).flatten() for place in places
    )
    moved = key_caches.flatten(1, 2)[:, source]

    def with_torch():
        for caches in (key_caches, value_caches):
            slots = caches.flatten(1, 2)
            slots.index_copy_(1, target, slots.index_select(1, source))

    compare(
        {
            "op": "compact_kv",
            "backend": backend,
            "shape": {"B": batch, "L": num_layers, "G": 8, "D": 128, "accepted": 4},
            "dtype": "float32",
        },
        ours=lambda: compact_kv(key_caches, value_caches, *indices, backend=backend),
        floor=lambda: (moved.clone(), moved.clone()),
        peer=with_torch,
    )
