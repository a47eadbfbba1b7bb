"""tree_attention of token trees: parity, windows by depth, isolation, and its bits."""

from dataclasses import replace

import pytest
import torch

from fastspec_kernels import build_tree, tree_attention

from .cases import device_of
from .paged import Paged, attention_backends, dense_outputs, paged, random_trees, seen_places

pytestmark = pytest.mark.usefixtures("instruction_set")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
backends = pytest.mark.parametrize("backend", attention_backends("tree_attention"))
compiled = pytest.mark.parametrize(
    "backend", [name for name in attention_backends("tree_attention") if name != "reference"]
)


def run(case: Paged, backend: str, **options):
    device = device_of(backend)
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    outputs = tree_attention(
        *case.to(device).tensors, return_logsumexp=True, backend=backend, **moved
    )
    return [output.cpu() for output in outputs]


def check(case: Paged, backend: str, **options) -> None:
    out, logsumexp = run(case, backend, **options)
    expected, expected_logsumexp = dense_outputs(case, **options)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=2 * tolerance)
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, atol=2e-6, rtol=2e-6)


def trees(batch: int, num_nodes: int, reach: int = 4) -> torch.Tensor:
    return build_tree(random_trees(batch, num_nodes, reach))[1]


def random_bits(batch: int, num_nodes: int) -> torch.Tensor:
    """Any bits at all, some rows without any."""
    mask = torch.randint(-(2**63), 2**63 - 1, (batch, num_nodes, -(-num_nodes // 64)))
    return mask.masked_fill(torch.rand(batch, num_nodes, 1) < 0.2, 0)


@backends
@pytest.mark.parametrize("sink", [-torch.inf, torch.inf])
def test_infinite_sinks_beside_rows_that_see_nothing(backend, sink):
    """-inf is no sink at all, +inf takes everything; padding of a tree sees nothing."""
    case = paged([4, 40], [4, 4])  # no context before the first tree
    mask = build_tree(torch.tensor([[-1, 0, -1, 2]] * 2, dtype=torch.int32))[1]
    sinks = torch.tensor([0.5, sink, sink, -1.0])
    check(case, backend, ancestor_mask=mask, sinks=sinks)


@backends
@pytest.mark.parametrize("num_nodes", [1, 2, 16, 63, 64, 65, 128])
def test_random_trees(backend, num_nodes):
    """As many rows as nodes, fewer, one, none; prefixes that end anywhere in a tile."""
    rows = [num_nodes, 1, 0, (num_nodes + 1) // 2]
    lengths = [num_nodes, 64, 0, num_nodes + 111]
    check(paged(lengths, rows, group=3), backend, ancestor_mask=trees(4, num_nodes))


@backends
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_size", [24, 64, 80])
def test_groups_and_head_sizes(backend, group, head_size):
    case = paged([150, 30], [19, 7], group=group, head_size=head_size)
    check(case, backend, ancestor_mask=trees(2, 19))


@backends
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256, 40, 100])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_sizes(backend, head_size, dtype):
    case = paged([90, 21], [9, 5], group=8, head_size=head_size, dtype=dtype)
    check(case, backend, ancestor_mask=trees(2, 9))


@backends
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 24])
def test_block_sizes(backend, block_size):
    check(paged([300, 77], [31, 12], block_size=block_size), backend, ancestor_mask=trees(2, 31))


@backends
@pytest.mark.parametrize("block_size", [16, 24, 48])
def test_few_rows_in_blocks_of_several_sizes(backend, block_size):
    """AMX reads their keys where the cache has them, where 16 of them are in one block."""
    case = paged(
        [300, 77], [5, 3], group=3, head_size=64, block_size=block_size, dtype=torch.bfloat16
    )
    check(case, backend, ancestor_mask=trees(2, 5))


@backends
@pytest.mark.parametrize("num_rows", [1, 40])
def test_long_contexts(backend, num_rows):
    lengths = [8192, 4097, 2048, 513, num_rows]
    case = paged(lengths, [num_rows] * 5, num_kv_heads=1, group=2, block_size=64)
    check(case, backend, ancestor_mask=trees(5, num_rows))


@backends
@pytest.mark.parametrize("window", [1, 2, 3, 7, 40, 64, 100, 5000])
@pytest.mark.parametrize("reach", [1, 3, 128])
def test_a_window_counts_depth(backend, window, reach):
    case = paged([170, 65, 129], [65, 65, 1], num_kv_heads=1)
    check(case, backend, ancestor_mask=trees(3, 65, reach), sliding_window=window)


@backends
@pytest.mark.parametrize("window", [0, 3, 50])
def test_any_bits(backend, window):
    case = paged([130, 70, 128, 3], [66, 5, 128, 3])
    check(case, backend, ancestor_mask=random_bits(4, 128), sliding_window=window)


@backends
def test_softcap_and_sinks(backend):
    options = {"softcap": 2.0, "scale": 0.7, "sinks": torch.tensor([-2.0, 0.0, 3.0, 30.0])}
    check(paged([90, 20], [17, 17]), backend, ancestor_mask=trees(2, 17), **options)
    check(paged([90, 20], [17, 17]), backend, **options)


@backends
@pytest.mark.parametrize("sinks", [None, torch.tensor([-3.0, 0.0, 5.0, 50.0])])
def test_a_row_that_sees_nothing(backend, sinks):
    case = paged([5, 9], [5, 3])
    mask = torch.zeros(2, 5, 1, dtype=torch.int64)
    mask[0, 2] = 3
    out, logsumexp = run(case, backend, ancestor_mask=mask, sinks=sinks)
    assert not out[[0, 1, 3, 4]].any()
    assert (logsumexp[[0, 1, 3, 4]] == -torch.inf).all()
    check(case, backend, ancestor_mask=mask, sinks=sinks)


@backends
@pytest.mark.parametrize(("num_nodes", "rows"), [(20, [7, 13]), (70, [7, 13]), (80, [66, 70])])
def test_bits_past_the_rows_are_ignored(backend, num_nodes, rows):
    case = paged([130, 90], rows)
    mask = trees(2, num_nodes)
    junk = mask.clone()
    for tree, num in zip(junk, rows, strict=True):
        tree[num:] = 5
        tree[:, num // 64] |= -1 << num % 64
        tree[:, num // 64 + 1 :] = -1
    for window in (0, 2):
        options = {"sliding_window": window}
        clean = run(case, backend, ancestor_mask=mask, **options)
        again = run(case, backend, ancestor_mask=junk, **options)
        assert all(map(torch.equal, again, clean))


@backends
@pytest.mark.parametrize(
    ("group", "head_size", "num_rows", "length", "node"),
    [
        (1, 16, 40, 150, 11),
        (1, 24, 40, 150, 11),
        (8, 16, 40, 150, 11),
        (8, 24, 40, 150, 11),
        (3, 64, 5, 192, 2),  # whole tiles of keys, which few rows read where they are
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_nodes_may_hold_anything(backend, group, head_size, num_rows, length, node, dtype):
    """NaN in one node, or before the window, reaches the rows that see it and no other."""
    case = paged([length], [num_rows], group=group, head_size=head_size, dtype=dtype)
    mask = trees(1, num_rows)
    clean, _ = run(case, backend, ancestor_mask=mask)
    places = seen_places(length, num_rows, 0, mask[0])
    sees = torch.tensor([length - num_rows + node in seen for seen in places])
    assert 0 < sees.sum() < num_rows
    place = length - num_rows + node
    for cache in (case.key_cache, case.value_cache):
        cache[case.block_table[0, place // 16], place % 16] = torch.nan
    poisoned, _ = run(case, backend, ancestor_mask=mask)
    assert torch.equal(poisoned[~sees], clean[~sees])
    assert poisoned[sees].isnan().all()


@compiled
@pytest.mark.parametrize("head_size", [16, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_has_the_same_bits_in_a_small_and_in_a_large_tree(backend, head_size, dtype):
    """Few rows meet keys where they lie, many rows meet packed ones.

    GPUs multiply 16-bit numbers of many rows by other instructions, which round in another way.
    """
    large, small, prefix = 70, 3, 300
    case = paged([prefix + large], [large], group=8, head_size=head_size, dtype=dtype)
    mask = trees(1, large)
    whole = run(case, backend, ancestor_mask=mask)
    few = replace(
        case,
        query=case.query[:small],
        context_lens=torch.tensor([prefix + small], dtype=torch.int32),
        cu_rows=torch.tensor([0, small], dtype=torch.int32),
    )
    alone = run(few, backend, ancestor_mask=mask[:, :small, :1].contiguous())
    tolerance = 0.0
    if device_of(backend) == "cuda" and dtype != torch.float32:
        tolerance = TOLERANCE[dtype]
    for ours, theirs in zip(alone, whole, strict=True):
        torch.testing.assert_close(ours, theirs[:small], atol=tolerance, rtol=tolerance)


@backends
@pytest.mark.parametrize("window", [0, 1, 9, 70])
@pytest.mark.parametrize("num_rows", [1, 20, 64, 100])
def test_a_tree_without_branches_is_a_chain(backend, num_rows, window):
    case = paged([700, 130], [num_rows, num_rows], group=3, head_size=24)
    mask = trees(2, num_rows, reach=1)
    as_tree = run(case, backend, ancestor_mask=mask, sliding_window=window)
    for ours, chain in zip(as_tree, run(case, backend, sliding_window=window), strict=True):
        assert torch.equal(ours, chain)


@compiled
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_batch_split_or_threads(backend, group, window, dtype):
    lengths, rows = [1500, 70, 600, 33], [33, 20, 1, 33]
    case = paged(lengths, rows, num_kv_heads=3, group=group, head_size=48, dtype=dtype)
    mask = trees(4, 33)
    options = {"sliding_window": window}
    whole = run(case, backend, ancestor_mask=mask, **options)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            again = run(case, backend, ancestor_mask=mask, **options)
            assert all(map(torch.equal, again, whole))
            for b in range(4):
                kept = slice(int(case.cu_rows[b]), int(case.cu_rows[b + 1]))
                alone = Paged(
                    case.query[kept],
                    case.key_cache,
                    case.value_cache,
                    case.block_table[b : b + 1],
                    case.context_lens[b : b + 1],
                    torch.tensor([0, rows[b]], dtype=torch.int32),
                    [],
                    [],
                )
                outputs = run(alone, backend, ancestor_mask=mask[b : b + 1].clone(), **options)
                for ours, expected in zip(outputs, whole, strict=True):
                    assert torch.equal(ours, expected[kept])
    finally:
        torch.set_num_threads(threads)


@compiled
def test_bits_of_a_row_do_not_depend_on_the_other_rows(backend):
    """Fewer nodes, another tree behind a node: rows that see the same have the same bits."""
    case = paged([700], [40], group=2, head_size=64)
    mask = trees(1, 40)
    whole = run(case, backend, ancestor_mask=mask)
    other = mask.clone()
    other[:, 20:] = trees(1, 40)[:, 20:]
    again = run(case, backend, ancestor_mask=other)
    for ours, first in zip(again, whole, strict=True):
        assert torch.equal(ours[:20], first[:20])


def test_fake_and_opcheck():
    tensors = paged([20, 3], [2, 1]).tensors
    op = torch.ops.fastspec.tree_attention.default
    torch.library.opcheck(op, (*tensors, 0.25, 3, 0.0, None, trees(2, 2), True, 1.0))
    on_meta = [tensor.to("meta") for tensor in tensors]
    out, logsumexp = op(*on_meta, 0.25, 0, 0.0, None, None, True, 1.0)
    assert (out.shape, logsumexp.shape) == ((3, 4, 16), (3, 4))


WRONG = [
    torch.ones(2, 4, 1, dtype=torch.int32),
    torch.ones(1, 4, 1, dtype=torch.int64),
    torch.ones(2, 4, 2, dtype=torch.int64),
    torch.ones(2, 65, 1, dtype=torch.int64),
    torch.ones(2, 129, 3, dtype=torch.int64),
    torch.ones(2, 0, 0, dtype=torch.int64),
    torch.ones(2, 4, dtype=torch.int64),
    [[1]],
]


@backends
@pytest.mark.parametrize("mask", WRONG)
def test_wrong_masks(backend, mask):
    with pytest.raises(ValueError, match=r"^ancestor_mask"):
        run(paged([20, 3], [3, 1]), backend, ancestor_mask=mask)


@backends
def test_a_mask_with_gaps(backend):
    case, mask = paged([20, 3], [3, 1]).to(device_of(backend)), torch.ones(2, 8, 1).long()
    with pytest.raises(ValueError, match=r"^ancestor_mask"):
        tree_attention(
            *case.tensors, ancestor_mask=mask.to(device_of(backend))[:, ::2], backend=backend
        )


@backends
def test_more_rows_than_nodes(backend):
    """Numbers on a GPU are not looked at by the host; what the rows see then is not defined."""
    if device_of(backend) == "cuda":
        pytest.skip("checked for tensors on the CPU alone")
    with pytest.raises(ValueError, match=r"^ancestor_mask"):
        run(paged([20, 3], [3, 1]), backend, ancestor_mask=torch.ones(2, 2, 1).long())
