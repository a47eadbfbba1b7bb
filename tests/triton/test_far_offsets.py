"""Offsets of 2**31 elements and more, in memory of which next to nothing is touched."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from fastspec_kernels import store_kv, tree_attention
from fastspec_kernels.backend import backends_of

FAR = 2**31
HEAD_SIZE = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    "triton" not in backends_of("store_kv", DEVICE), reason="Triton runs on no device here"
)


def far_apart(num: int, dtype: torch.dtype, outer: int = 1) -> torch.Tensor:
    """[outer, num, HEAD_SIZE]; the last of `num` is FAR elements behind the first."""
    stride = FAR // (num - 1)
    memory = torch.empty(FAR + outer * HEAD_SIZE, dtype=dtype, device=DEVICE)
    tensor = memory.as_strided((outer, num, HEAD_SIZE), (HEAD_SIZE, stride, 1))
    return tensor.copy_(torch.randn(tensor.shape, device=DEVICE))


def ints(*values: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_heads():
    rows = far_apart(3, torch.float16)
    stored = {}
    for backend in ("triton", "reference"):
        cache = torch.zeros(1, 1, 3, HEAD_SIZE, dtype=torch.float16, device=DEVICE)
        caches = cache, cache.clone()
        store_kv(rows, rows, *caches, ints(0, dtype=torch.int64), backend=backend)
        attended = tree_attention(rows, *caches, ints([0]), ints(1), ints(0, 1), backend=backend)
        stored[backend] = (*caches, attended)
    for found, expected in zip(stored["triton"], stored["reference"], strict=True):
        assert torch.equal(found, expected)


def test_slots_of_a_block():
    cache = far_apart(17, torch.float8_e4m3fn)[:, :, None]
    query = torch.randn(2, 1, HEAD_SIZE, device=DEVICE)
    paged = (cache, cache, ints([0]), ints(17), ints(0, 2))
    found = tree_attention(query, *paged, backend="triton")
    expected = tree_attention(query, *paged, backend="reference")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
