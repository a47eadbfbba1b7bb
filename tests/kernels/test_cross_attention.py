"""cross_attention: every row of a sequence sees its whole context, which the rows are not in."""

import pytest
import torch

from fastspec_kernels import cross_attention

from .cases import device_of
from .paged import Paged, attention_backends, dense_rows, paged

pytestmark = pytest.mark.usefixtures("instruction_set")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
backends = pytest.mark.parametrize("backend", attention_backends("cross_attention"))


def run(case: Paged, backend: str, **options) -> torch.Tensor:
    tensors = case.to(device_of(backend)).tensors
    return cross_attention(*tensors, backend=backend, **options).cpu()


def check(case: Paged, backend: str, scale: float | None = None) -> None:
    lengths, rows = case.context_lens.tolist(), case.cu_rows.diff().tolist()
    places = [
        list(range(length))
        for length, count in zip(lengths, rows, strict=True)
        for _ in range(count)
    ]
    out, (expected, _) = run(case, backend, scale=scale), dense_rows(case, places, scale)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=2 * tolerance)


@backends
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([200, 1, 65, 17], [1, 1, 1, 1]),
        ([64, 3, 0, 0, 9], [5, 40, 2, 0, 0]),
        ([1100, 513], [3, 70]),
        ([0], [4]),
        ([7], [0]),
        ([], []),
    ],
    ids=str,
)
def test_matches_dense_attention(backend, lengths, rows):
    check(paged(lengths, rows), backend)


@backends
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (3, 24), (4, 128), (8, 80)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_layouts(backend, group, head_size, dtype):
    check(paged([70, 9], [3, 11], group=group, head_size=head_size, dtype=dtype), backend, 0.3)


@backends
def test_a_long_context(backend):
    check(paged([8192, 40], [5, 5], num_kv_heads=1, group=4, block_size=64), backend)


@backends
def test_no_context_gives_zeros(backend):
    out = run(paged([0, 5], [3, 1]), backend)
    assert not out[:3].any()
    assert out[3:].all()


@pytest.mark.parametrize(
    "backend", [name for name in attention_backends("cross_attention") if name != "reference"]
)
def test_bits_of_a_row_depend_on_nothing_else(backend):
    case = paged([1100, 90], [20, 70], group=3, head_size=48)
    whole = run(case, backend)
    for row, b in [(0, 0), (7, 0), (19, 0), (20, 1), (89, 1)]:
        alone = Paged(
            case.query[row : row + 1],
            case.key_cache,
            case.value_cache,
            case.block_table[b : b + 1],
            case.context_lens[b : b + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            [],
            [],
        )
        assert torch.equal(run(alone, backend)[0], whole[row])


@backends
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", lambda query: query.double()),
        ("query", lambda query: query[:, :3]),
        ("key_cache", lambda cache: cache[0]),
        ("value_cache", lambda cache: cache.half()),
        ("block_table", lambda table: table.fill_(-1)),
        ("block_table", lambda table: table.fill_(1000)),
        ("context_lens", lambda lens: lens - 21),
        ("context_lens", lambda lens: lens + 2**30),
        ("cu_rows", lambda rows: rows + 1),
        ("cu_rows", lambda rows: rows[:2]),
        ("scale", lambda _: float("nan")),
    ],
)
def test_wrong_arguments(backend, name, change):
    names = ["query", "key_cache", "value_cache", "block_table", "context_lens", "cu_rows"]
    good = {**dict(zip(names, paged([20, 3], [2, 1]).tensors, strict=True)), "scale": None}
    with pytest.raises(ValueError, match=f"^{name}"):
        cross_attention(**{**good, name: change(good[name])}, backend=backend)


def test_opcheck():
    tensors = paged([20, 0], [2, 1]).tensors
    torch.library.opcheck(torch.ops.fastspec.cross_attention.default, (*tensors, 0.25, 1.0))
