"""tree_attention beside one read of its keys and values, its matrix products, and gather + SDPA."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fastspec_kernels import build_tree, cross_attention, tree_attention

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


def parents_of(num_rows):
    """A tree whose nodes hang on one of the four before."""
    torch.manual_seed(0)
    node = torch.arange(num_rows)
    return (node - 1 - (torch.rand(num_rows) * node.clamp(max=4)).long()).int()[None]


def seen_by(num_rows, context, parents):
    """The boolean mask of a chain or of a tree, as torch's own attention takes it."""
    if parents is None:
        return torch.ones(num_rows, context, dtype=torch.bool).tril(context - num_rows)
    seen = torch.ones(num_rows, context, dtype=torch.bool)
    seen[:, context - num_rows :] = torch.eye(num_rows, dtype=torch.bool)
    for node, parent in enumerate(parents[0].tolist()):
        if parent >= 0:
            seen[node, context - num_rows :] |= seen[parent, context - num_rows :]
    return seen


def gather_and_sdpa(seen, query, key_cache, value_cache, block_table, context_lens, cu_rows):
    """What one does without a kernel: copy the pages together, then torch's own attention."""
    context = int(context_lens)
    keys, values = (
        cache[block_table[0].long()].flatten(0, 1)[:context].transpose(0, 1)
        for cache in (key_cache, value_cache)
    )
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
    ("name", "num_rows", "mask"),
    [
        ("long", 1, "chain"),
        ("long", 16, "chain"),
        ("long", 16, "tree"),
        ("long", 64, "tree"),
        ("tiny", 1, "chain"),
        ("tiny", 5, "chain"),
        ("tiny", 32, "tree"),
    ],
)
def test_tree_attention(compare, name, num_rows, mask, dtype, backend):
    shape, torch_dtype = SHAPES[name], DTYPES[dtype]
    case = inputs(shape, num_rows, torch_dtype)
    operands = products(shape, num_rows, torch_dtype)
    parents = parents_of(num_rows) if mask == "tree" else None
    ancestor_mask = None if parents is None else build_tree(parents)[1]
    seen = seen_by(num_rows, shape["context"], parents)

    def attend(backend):
        return tree_attention(*case, ancestor_mask=ancestor_mask, backend=backend)

    tolerance = TOLERANCE[torch_dtype]
    expected = attend("reference")
    torch.testing.assert_close(attend(backend), expected, atol=tolerance, rtol=2 * tolerance)
    torch.testing.assert_close(gather_and_sdpa(seen, *case), expected, atol=2e-2, rtol=2e-2)
    compare(
        {
            "op": "tree_attention",
            "backend": backend,
            "shape": {**shape, "T": num_rows, "block_size": BLOCK_SIZE, "mask": mask},
            "dtype": dtype,
        },
        ours=lambda: attend(backend),
        floor=lambda: (case[1].sum(), case[2].sum()),
        matmul=lambda: [a @ b for a, b in operands],
        peer=lambda: gather_and_sdpa(seen, *case),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "num_rows"), [("long", 1), ("tiny", 1)])
def test_cross_attention(compare, name, num_rows, backend):
    shape = SHAPES[name]
    case = inputs(shape, num_rows, torch.float32)
    seen = torch.ones(num_rows, shape["context"], dtype=torch.bool)
    expected = cross_attention(*case, backend="reference")
    tolerance = TOLERANCE[torch.float32]
    ours = cross_attention(*case, backend=backend)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=2 * tolerance)
    torch.testing.assert_close(gather_and_sdpa(seen, *case), expected, atol=2e-2, rtol=2e-2)
    compare(
        {
            "op": "cross_attention",
            "backend": backend,
            "shape": {**shape, "T": num_rows, "block_size": BLOCK_SIZE},
            "dtype": "float32",
        },
        ours=lambda: cross_attention(*case, backend=backend),
        floor=lambda: (case[1].sum(), case[2].sum()),
        peer=lambda: gather_and_sdpa(seen, *case),
    )
