"""tree_attention beside one read of its keys and values, its matrix products, and gather + SDPA."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fastspec_kernels import tree_attention

from .inputs import BACKENDS

BLOCK_SIZE = 16
SHAPES = {
    "long": {"context": 8192, "num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    "tiny": {"context": 200, "num_heads": 3, "num_kv_heads": 1, "head_size": 64},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def inputs(shape, num_rows, dtype):
    """One sequence whose blocks lie anywhere in the cache."""
    torch.manual_seed(0)
    num_blocks = -(-shape["context"] // BLOCK_SIZE)
    cache = (2, num_blocks, BLOCK_SIZE, shape["num_kv_heads"], shape["head_size"])
    key_cache, value_cache = torch.randn(cache).to(dtype)
    return (
        torch.randn(num_rows, shape["num_heads"], shape["head_size"]).to(dtype),
        key_cache,
        value_cache,
        torch.randperm(num_blocks).to(torch.int32)[None],
        torch.tensor([shape["context"]], dtype=torch.int32),
        torch.tensor([0, num_rows], dtype=torch.int32),
    )


def gather_and_sdpa(query, key_cache, value_cache, block_table, context_lens, cu_rows):
    """What one does without a kernel: copy the pages together, then torch's own attention."""
    context, num_rows = int(context_lens), query.shape[0]
    keys, values = (
        cache[block_table[0].long()].flatten(0, 1)[:context].transpose(0, 1)
        for cache in (key_cache, value_cache)
    )
    seen = torch.ones(num_rows, context, dtype=torch.bool).tril(context - num_rows)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], seen, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def products(shape, num_rows, dtype):
    """Operands of the two products of attention, already in the best layout."""
    heads, rows = shape["num_kv_heads"], num_rows * shape["num_heads"] // shape["num_kv_heads"]
    context, head_size = shape["context"], shape["head_size"]
    left = torch.randn(heads, rows, head_size), torch.randn(heads, rows, context)
    right = torch.randn(heads, head_size, context), torch.randn(heads, context, head_size)
    return [(a.to(dtype), b.to(dtype)) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "num_rows"), [("long", 1), ("long", 16), ("tiny", 1), ("tiny", 5)]
)
def test_tree_attention(compare, name, num_rows, dtype, backend):
    shape, torch_dtype = SHAPES[name], DTYPES[dtype]
    case = inputs(shape, num_rows, torch_dtype)
    operands = products(shape, num_rows, torch_dtype)
    ours = tree_attention(*case, backend=backend)
    tolerance = TOLERANCE[torch_dtype]
    expected = tree_attention(*case, backend="reference")
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=2 * tolerance)
    torch.testing.assert_close(gather_and_sdpa(*case), expected, atol=2e-2, rtol=2e-2)
    compare(
        {
            "op": "tree_attention",
            "backend": backend,
            "shape": {**shape, "T": num_rows, "block_size": BLOCK_SIZE},
            "dtype": dtype,
        },
        ours=lambda: tree_attention(*case, backend=backend),
        floor=lambda: (case[1].sum(), case[2].sum()),
        matmul=lambda: [a @ b for a, b in operands],
        peer=lambda: gather_and_sdpa(*case),
    )
