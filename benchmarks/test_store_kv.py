"""Writes of one step's keys and values."""

import pytest
import torch

from fastspec_kernels import store_kv

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
