"""tree_attention against dense attention, with poison around it, and bit for bit with itself."""

import math

import pytest
import torch

from fastspec_kernels import tree_attention

from .cases import device_of
from .paged import Paged, attention_backends, dense_attention, paged

pytestmark = pytest.mark.usefixtures("instruction_set")

FEW_ROWS = 32  # see tree_attention
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
backends = pytest.mark.parametrize("backend", attention_backends("tree_attention"))
compiled = pytest.mark.parametrize(
    "backend", [name for name in attention_backends("tree_attention") if name != "reference"]
)

SHAPES = {
    "decode": ([200, 1, 65, 17], [1, 1, 1, 1]),
    "verify": ([63, 64, 130, 6], [5, 3, 5, 6]),
    "empty": ([0, 5, 40, 0, 9], [0, 0, 4, 0, 9]),
    "prefill": ([150, 33], [150, 20]),
    "splits": ([1100, 513], [2, 1]),
}


def run(case: Paged, backend: str, **options) -> torch.Tensor:
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(device_of(backend))
    return tree_attention(*case.to(device_of(backend)).tensors, backend=backend, **options).cpu()


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=2 * tolerance)


@backends
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [1, 16, 33])
def test_matches_dense_attention(backend, shape, block_size):
    case = paged(*SHAPES[shape], block_size=block_size)
    assert_near(run(case, backend), dense_attention(case))


@compiled
@pytest.mark.parametrize("window", [2**31 - 1, 2**63 - 1])
def test_a_window_longer_than_the_context_is_none(backend, window):
    case = paged([70, 130], [11, 40])
    assert torch.equal(run(case, backend, sliding_window=window), run(case, backend))


@backends
@pytest.mark.parametrize(
    ("group", "head_size"), [(1, 64), (3, 8), (4, 128), (8, 80), (3, 64), (5, 24), (2, 1), (71, 16)]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_layouts(backend, group, head_size, dtype):
    case = paged([70, 9], [3, 9], num_kv_heads=2, group=group, head_size=head_size, dtype=dtype)
    assert_near(run(case, backend), dense_attention(case))


@backends
def test_long_prefill(backend):
    case = paged([300, 700], [300, 300], num_kv_heads=1, group=1, head_size=8)
    assert_near(run(case, backend), dense_attention(case))


@backends
@pytest.mark.parametrize("window", [1, 7, 64, 100, 5000])
@pytest.mark.parametrize("shape", ["decode", "prefill", "splits"])
def test_sliding_window(backend, window, shape):
    case = paged(*SHAPES[shape], num_kv_heads=1)
    out = run(case, backend, sliding_window=window)
    assert_near(out, dense_attention(case, sliding_window=window))


@backends
@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 20])
def test_softcap_and_sinks(backend, softcap, with_sinks, window):
    case = paged([90, 12, 600], [4, 1, 2])
    sinks = torch.tensor([-2.0, 0.0, 3.0, 30.0]) if with_sinks else None
    options = {"softcap": softcap, "sliding_window": window, "sinks": sinks, "scale": 0.7}
    assert_near(run(case, backend, **options), dense_attention(case, **options))


@backends
def test_sinks_may_have_the_dtype_of_the_query(backend):
    case = paged([30], [2], dtype=torch.bfloat16)
    sinks = torch.tensor([0.5, 1.0, -1.0, 4.0], dtype=torch.bfloat16)
    assert_near(run(case, backend, sinks=sinks), dense_attention(case, sinks=sinks))


@backends
def test_large_scores_do_not_overflow(backend):
    case = paged([80], [3])
    case.query.mul_(1000)
    out = run(case, backend)
    torch.testing.assert_close(out.double(), dense_shifted(case), atol=1e-3, rtol=1e-3)


def dense_shifted(case: Paged) -> torch.Tensor:
    """Dense attention of queries too large for exp: torch's own softmax on the same contexts."""
    queries = case.query.double().transpose(0, 1)
    group = queries.shape[0] // case.key_cache.shape[2]
    keys, values = (
        dense[0].double().transpose(0, 1).repeat_interleave(group, 0)
        for dense in (case.keys, case.values)
    )
    scores = queries @ keys.transpose(1, 2) * queries.shape[2] ** -0.5
    num_rows, context = scores.shape[1:]
    hidden = torch.ones(num_rows, context, dtype=torch.bool).triu(context - num_rows + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@backends
@pytest.mark.parametrize("head_size", [16, 24])
def test_a_row_ignores_later_tokens(backend, head_size):
    """NaN in the keys and values of a draft token reaches the rows that see it and no other."""
    case = paged([70], [6], head_size=head_size)
    clean = run(case, backend)
    block, offset = int(case.block_table[0, 66 // 16]), 66 % 16
    case.key_cache[block, offset] = torch.nan
    case.value_cache[block, offset] = torch.nan
    poisoned = run(case, backend)
    assert torch.equal(poisoned[:2], clean[:2])
    assert poisoned[2:].isnan().all()


@backends
@pytest.mark.parametrize("strided", ["heads first", "padded"])
def test_query_may_be_a_view(backend, strided):
    case = paged([40, 17], [3, 2])
    expected = dense_attention(case)
    if strided == "heads first":
        case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        padded = torch.full((5, 9, 20), torch.nan)
        padded[:, 1::2, 2:18] = case.query
        case.query = padded[:, 1::2, 2:18]
    out = run(case, backend)
    assert out.is_contiguous()
    assert_near(out, expected)


@backends
@pytest.mark.parametrize("dim", [1, 2])  # of blocks, or of slots
@pytest.mark.parametrize(
    "sizes", [{}, {"group": 3, "head_size": 64, "dtype": torch.bfloat16}], ids=["", "16 bits"]
)
def test_caches_may_be_interleaved(backend, dim, sizes):
    case = paged([140, 17], [3, 2], **sizes)
    expected = dense_attention(case)
    both = torch.stack([case.key_cache, case.value_cache], dim)
    case.key_cache, case.value_cache = both.unbind(dim)
    assert_near(run(case, backend), expected)


@backends
def test_no_rows(backend):
    assert run(paged([5, 0], [0, 0]), backend).shape == (0, 4, 16)
    assert run(paged([], []), backend).shape == (0, 4, 16)


def row_of(case: Paged, b: int, num_rows: int, last: int) -> Paged:
    """Sequence b alone, cut after position `last`, with that many query rows."""
    start = int(case.cu_rows[b + 1]) - (int(case.context_lens[b]) - last - 1)
    return Paged(
        query=case.query[start - num_rows : start],
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_table=case.block_table[b : b + 1],
        context_lens=torch.tensor([last + 1], dtype=torch.int32),
        cu_rows=torch.tensor([0, num_rows], dtype=torch.int32),
        keys=[],
        values=[],
    )


@compiled
@pytest.mark.parametrize(("group", "head_size"), [(1, 48), (3, 48), (3, 64), (2, 96), (8, 48)])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_nothing_else(backend, group, head_size, window, dtype):
    """One token at a time, several at once, or inside a batch: the same bits.

    On GPUs, sequences of more packed rows of 16 bits than FEW_ROWS are a kind of their own.
    """
    lengths, rows = [1100, 90, 600], [20, 90, 5]
    most = FEW_ROWS if device_of(backend) == "cuda" and dtype != torch.float32 else math.inf
    case = paged(lengths, rows, group=group, head_size=head_size, dtype=dtype)
    whole = run(case, backend, sliding_window=window)
    for b, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        last_row = int(case.cu_rows[b + 1])
        for num_rows, behind in [(1, 0), (1, 3), (5, 0), (2, 2)]:
            alone = row_of(case, b, num_rows, length - behind - 1)
            out = run(alone, backend, sliding_window=window)
            expected = whole[last_row - behind - num_rows : last_row - behind]
            assert_near(out, expected.double())
            if (num_rows * group > most) == (count * group > most):
                assert torch.equal(out, expected), (b, num_rows, behind, count)


@compiled
def test_bits_do_not_depend_on_blocks_or_threads(backend):
    case = paged([2000, 1500], [3, 1], num_kv_heads=4, head_size=64)
    whole = run(case, backend)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(run(case, backend), whole)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(case.key_cache.shape[0])
    used = case.block_table.clamp(0, len(order) - 1)
    moved = torch.argsort(order)[used.long()].to(torch.int32)
    case.block_table = torch.where(used == case.block_table, moved, case.block_table)
    case.key_cache, case.value_cache = case.key_cache[order], case.value_cache[order]
    assert torch.equal(run(case, backend), whole)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_opcheck(sinks):
    tensors = paged([20, 3], [2, 1]).tensors
    op = torch.ops.fastspec.tree_attention.default
    torch.library.opcheck(op, (*tensors, 0.25, 0, 0.0, sinks, None, False, 1.0))
