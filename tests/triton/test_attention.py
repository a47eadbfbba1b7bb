"""The interpreted attention kernels against the reference, and bit for bit with themselves."""

import pytest
import torch

from fastspec_kernels import build_tree, cross_attention, reference, tree_attention

from ..kernels.paged import Paged, in_float8, paged

tl = pytest.importorskip("triton.language", reason="needs triton")

from fastspec_kernels.triton import attention, attention_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/kernels runs the compiled kernels"
)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SPLITS = pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])


def check(case: Paged, op=tree_attention, **options) -> torch.Tensor:
    out = op(*case.tensors, backend="triton", **options)
    expected = op(*case.tensors, backend="reference", **options)
    if options.get("return_logsumexp"):
        torch.testing.assert_close(out[1], expected[1], atol=2e-6, rtol=2e-6)
        out, expected = out[0], expected[0]
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=2 * tolerance)
    return out


def random_trees(batch: int, num_nodes: int) -> torch.Tensor:
    parents = torch.full((batch, num_nodes), -1, dtype=torch.int32)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(0, node, (batch,))
    return build_tree(parents, backend="reference")[1]


@SPLITS
@pytest.mark.parametrize("block_size", [1, 33])
def test_chains(monkeypatch, programs, block_size):
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
    case = paged([600, 5, 0, 64, 40], [3, 5, 0, 1, 33], block_size=block_size)
    check(case, return_logsumexp=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (3, 80), (5, 24), (2, 1)])
def test_head_layouts(dtype, group, head_size):
    check(paged([70, 9], [3, 9], group=group, head_size=head_size, dtype=dtype))


def test_the_widest_heads():
    check(paged([40, 9], [3, 9], group=3, num_kv_heads=1, head_size=260, dtype=torch.float16))


@pytest.mark.check
@SPLITS
@pytest.mark.parametrize(
    ("dtype", "group", "head_size"),
    [(torch.float32, 3, 80), (torch.bfloat16, 4, 128), (torch.float16, 1, 64)],
)
def test_float8_caches(monkeypatch, programs, dtype, group, head_size):
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
    case = in_float8(paged([530, 9], [3, 9], group=group, head_size=head_size, dtype=dtype))
    check(case, return_logsumexp=True, key_scale=0.5, value_scale=3.0)
    check(case, cross_attention, key_scale=0.25)


@pytest.mark.parametrize("window", [0, 50])
def test_trees_over_float8_caches(window):
    case = in_float8(paged([150, 40], [9, 9], num_kv_heads=1, dtype=torch.bfloat16))
    check(case, ancestor_mask=random_trees(2, 9), sliding_window=window, value_scale=0.5)


@pytest.mark.parametrize(
    ("num_nodes", "window"),
    [(7, 0), (7, 5), (64, 90), pytest.param(100, 5, marks=pytest.mark.check)],
)
def test_trees(num_nodes, window):
    """Windows reach back by depth; one row sees nothing of its tree, another garbage bits."""
    rows = [num_nodes, min(5, num_nodes), 0, num_nodes]
    case = paged([50 + num_nodes, 530, 9, num_nodes], rows, num_kv_heads=1)
    masks = random_trees(4, num_nodes)
    masks[0, num_nodes // 2] = 0
    masks[3, 0] = 0
    masks[1] |= torch.randint(-(2**62), 2**62, masks[1].shape) << 5
    options = {"softcap": 2.0, "sinks": torch.tensor([0.5, 3.0])} if window == 5 else {}
    case_options = {"ancestor_mask": masks, "sliding_window": window, "return_logsumexp": True}
    check(case, **case_options, **options)


@pytest.mark.parametrize("num_rows", [60, 66])
def test_bits_past_the_rows_are_ignored(num_rows):
    """In either word; the block of keys goes on past the last row."""
    masks = random_trees(1, 80)
    masks[..., num_rows // 64] |= -1 << num_rows % 64
    masks[..., 1 + num_rows // 64 :] = -1
    case = paged([64 + num_rows], [num_rows], num_kv_heads=1)
    check(case, ancestor_mask=masks, return_logsumexp=True)


@pytest.mark.check
@pytest.mark.parametrize("window", [1, 100, 2**63 - 1])
def test_windows(window):
    check(paged([200, 1, 65, 600], [1, 1, 20, 2], num_kv_heads=1), sliding_window=window)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_and_sinks(softcap):
    sinks = torch.tensor([-2.0, 0.0, 3.0, 30.0])
    options = {"scale": 0.7, "softcap": softcap, "sinks": sinks, "return_logsumexp": True}
    check(paged([90, 12, 600], [4, 1, 2]), **options)


def test_negative_scale():
    check(paged([90, 12], [4, 1]), scale=-0.3)


@SPLITS
def test_cross_attention(monkeypatch, programs):
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
    case = paged([600, 0, 3, 64], [2, 2, 40, 1])
    check(case, cross_attention)


def row_of(case: Paged, b: int, num_rows: int, last: int) -> Paged:
    """Sequence b alone, cut after position `last`, with that many query rows."""
    start = int(case.cu_rows[b + 1]) - (int(case.context_lens[b]) - last - 1)
    lengths = torch.tensor([last + 1], dtype=torch.int32)
    cu_rows = torch.tensor([0, num_rows], dtype=torch.int32)
    query, table = case.query[start - num_rows : start], case.block_table[b : b + 1]
    return Paged(query, case.key_cache, case.value_cache, table, lengths, cu_rows, [], [])


@pytest.mark.check
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (50, torch.float16)])
def test_bits_of_a_row_depend_on_nothing_else(monkeypatch, fixed_order_products, window, dtype):
    """Alone or in a batch, with more rows or fewer of their kind, split or whole: the same bits."""
    lengths, rows = [600, 90, 300], [20, 40, 5]  # two of each packed: many, many, few
    case = paged(lengths, rows, num_kv_heads=1, head_size=48, dtype=dtype)
    options = {"sliding_window": window, "backend": "triton"}
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", 64)
    whole = tree_attention(*case.tensors, **options)
    for programs in (1, 8):
        monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
        assert torch.equal(tree_attention(*case.tensors, **options), whole)
        for b, (num_rows, behind) in enumerate([(17, 3), (30, 5), (2, 2)]):
            alone = row_of(case, b, num_rows, lengths[b] - behind - 1)
            last = int(case.cu_rows[b + 1]) - behind
            out = tree_attention(*alone.tensors, **options)
            assert torch.equal(out, whole[last - num_rows : last]), (b, programs)


def test_a_chain_as_a_tree_has_the_bits_of_the_chain(fixed_order_products):
    case = paged([520, 70], [9, 6])
    masks = torch.tensor([[2 ** (i + 1) - 1] for i in range(9)]).expand(2, 9, 1).contiguous()
    chain = tree_attention(*case.tensors, backend="triton")
    tree = tree_attention(*case.tensors, ancestor_mask=masks, backend="triton")
    assert torch.equal(chain, tree)


@SPLITS
@pytest.mark.parametrize(
    ("poison", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)]
)
def test_values_reach_only_the_rows_that_see_them(
    monkeypatch, fixed_order_products, programs, poison, dtype
):
    """One column of a value spoilt: that column of the rows that see it, and no other bit."""
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
    case = paged([600, 70], [3, 6], head_size=24, dtype=dtype)
    clean = tree_attention(*case.tensors, backend="triton")
    block, offset = int(case.block_table[1, 66 // 16]), 66 % 16
    case.value_cache[block, offset, 0, 7] = poison
    out = tree_attention(*case.tensors, backend="triton")
    assert out[5:, :2, 7].isnan().all()
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[5:, :2, 7] = True
    assert torch.equal(out[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("mask", ["chain", "tree", "cross"])
def test_hostile_numbers_stay_inside_the_cache(mask):
    """Lengths past the table and blocks past the cache, as a GPU may get them: no crash."""
    case = paged([40, 20, 33], [5, 5, 5])
    case.block_table[0] = torch.tensor([-5, 2**31 - 1, 0, -(2**31), 7]).repeat(2)
    case.context_lens[:] = torch.tensor([2**31 - 1, 2, -7])
    if mask == "cross":
        out = attention.cross_attention(*case.tensors, 1.0, 1.0)
    else:
        masks = random_trees(3, 5) if mask == "tree" else None
        out, _ = attention.tree_attention(*case.tensors, 1.0, 0, 0.0, None, masks, True, 1.0)
    assert out.shape == case.query.shape


def test_room_for_partials():
    """None where no sequence can be long, or enough programs have all; never more than 512 MB."""
    room = attention.room_for_partials
    assert room(1, 32, 160, 128, 256) == 0
    assert room(1, 32, 160, 128, 8192) == 160 * 33
    assert room(1, 32, 160, 128, 2**17) == 2**15 + 160
    assert room(84, 32, 10240, 128, 8192) == 0
    assert room(84, 32, 10240, 128, 2**14) == 10240 * 17
    assert room(84, 32, 10240, 128, 2**17) == 2**29 // 528
    assert room(128, 32, 2**15, 128, 2**17) == 2**29 // 528
    assert room(129, 32, 2**16, 128, 2**17) == 0


@pytest.mark.parametrize(("length", "window"), [(4700, 0), (6100, 4400), (16500, 0)])
def test_bits_do_not_depend_on_the_number_of_splits(monkeypatch, length, window):
    """Whole, split at the ends of runs among two or three programs, and at those of chunks; also
    more runs than one block of factors holds."""
    monkeypatch.setattr(attention_kernels, "AT_ONCE", tl.constexpr(8))
    case = paged([length], [2], num_kv_heads=1, group=1, block_size=64)
    found = []
    for programs in (1, 2, 3, 64):
        monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
        found.append(tree_attention(*case.tensors, sliding_window=window, backend="triton"))
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_bfloat16_is_rounded_not_cut():
    """The interpreter multiplies in float32: nearly every number rounds as the exact one does."""
    case = paged([90, 12], [4, 5], dtype=torch.bfloat16)
    out = tree_attention(*case.tensors, backend="triton")
    exact = [x.float() if x.is_floating_point() else x for x in case.tensors]
    expected = tree_attention(*exact, backend="reference").bfloat16()
    assert (out == expected).float().mean() > 0.98


def test_bfloat16_zeros_stay_zeros():
    case = paged([30], [2], dtype=torch.bfloat16)
    case.value_cache.zero_()
    assert (tree_attention(*case.tensors, backend="triton") == 0).all()


@pytest.mark.parametrize("op", [tree_attention, cross_attention])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 512), (torch.float32, 256)], ids=str)
def test_heads_too_wide_are_refused(op, dtype, most):
    case = paged([5], [1], head_size=most + 1, dtype=dtype)
    with pytest.raises(ValueError, match=f"query: head size {most + 1}, triton takes at most"):
        op(*case.tensors, backend="triton")


def test_reference_and_kernels_take_the_same_arguments():
    case = paged([20], [2])
    options = (0.25, 0, 0.0, None, None, True, 1.0)
    out, logsumexp = attention.tree_attention(*case.tensors, *options)
    expected, expected_logsumexp = reference.tree_attention(*case.tensors, *options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logsumexp, expected_logsumexp, atol=1e-6, rtol=1e-6)
