"""The parts of the Triton backend that no other backend has: cuts, candidates, launches."""

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from fastspec_kernels import backend, reference  # noqa: E402
from fastspec_kernels.triton import filters, tiles  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "triton" not in backend.backends_of("row_stats", DEVICE):
    pytest.skip("Triton runs on no device here", allow_module_level=True)

from fastspec_kernels import triton as ops  # noqa: E402
from fastspec_kernels.triton.bounds import sampled_ids  # noqa: E402
from fastspec_kernels.triton.statistics import tile_statistics_kernel  # noqa: E402

VOCAB = 3 * tiles.LARGEST_TILE + 5


@pytest.fixture
def launches(monkeypatch):
    """The grids of all launches of a test."""
    grids = []
    kind = type(tile_statistics_kernel)
    run = kind.run

    def counted(self, *args, grid, **kwargs):
        grids.append(grid)
        return run(self, *args, grid=grid, **kwargs)

    monkeypatch.setattr(kind, "run", counted)
    return grids


@pytest.fixture
def searches(monkeypatch):
    """What the launches of all searches of a test have handed on."""
    made = []
    new_search = filters._new_search

    def kept(*args):
        made.append(new_search(*args))
        return made[-1]

    monkeypatch.setattr(filters, "_new_search", kept)
    return made


@triton.jit
def sampled_ids_kernel(out, vocab, SAMPLE: tl.constexpr):
    tl.store(out + tl.arange(0, SAMPLE), sampled_ids(vocab, SAMPLE))


def ids_of_sample(vocab):
    ids = torch.empty(filters.SAMPLE, dtype=torch.int64, device=DEVICE)
    sampled_ids_kernel[(1,)](ids, vocab, SAMPLE=filters.SAMPLE)
    return ids


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    values = zip((temperature, top_k, top_p, min_p), dtypes, strict=True)
    return [torch.full((rows,), value, dtype=dtype, device=DEVICE) for value, dtype in values]


def check_kept(logits, sampling):
    """Compare what is kept, and its logsumexp, with the reference."""
    logsumexp, threshold = ops.row_stats(logits, *sampling, None)
    expected_sum, expected = reference.row_stats(logits, *sampling, None)
    kept, expected_kept = logits >= threshold[:, None], logits >= expected[:, None]
    assert torch.equal(kept, expected_kept)
    torch.testing.assert_close(logsumexp, expected_sum, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 4095, 4096, 4097, 50257, 128256, 262144])
def test_tiles_cover_a_row_once(vocab):
    tiling = tiles.tiling_of(vocab)
    assert (tiling.num_tiles - 1) * tiling.tile < vocab <= tiling.num_tiles * tiling.tile
    assert tiling.num_tiles <= tiling.merged < 2 * tiling.num_tiles + 1
    assert tiling.tile & (tiling.tile - 1) == tiling.merged & (tiling.merged - 1) == 0


@pytest.mark.parametrize("spread", [1e-3, 3.0])
def test_cuts_of_long_rows(spread):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCAB, generator=generator).to(DEVICE) * spread
    sampling = params(3)
    sampling[1][:] = torch.tensor([50, 0, 500])
    sampling[2][:] = torch.tensor([1.0, 0.9, 0.8])
    check_kept(logits, sampling)


@pytest.mark.parametrize("vocab", [4097, 5119, 8192, VOCAB, 128256])
def test_a_sample_is_of_the_whole_row_and_takes_nothing_twice(vocab):
    ids = ids_of_sample(vocab).sort().values
    assert ids[0] >= 0
    assert ids[-1] < vocab
    assert (ids.diff() > 0).all()
    assert ids.diff().max() < 2 * vocab / filters.SAMPLE * 4


@pytest.mark.parametrize("vocab", [1, 33, 3000, 4096])
def test_a_sample_of_a_short_row_is_the_row(vocab):
    ids = ids_of_sample(vocab)
    assert torch.equal(ids, torch.arange(filters.SAMPLE, device=DEVICE))


@pytest.mark.parametrize("expected", [filters.EXPECTED, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_brackets_that_hold_too_much_are_cut(searches, monkeypatch, dtype, expected):
    monkeypatch.setattr(filters, "EXPECTED", expected)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, VOCAB, generator=generator).to(DEVICE, dtype)
    sampling = params(5)
    sampling[1][:] = torch.tensor([50, 500, 500, 0, 0])
    sampling[2][:] = torch.tensor([1.0, 1.0, 0.7, 0.5, 0.99])
    check_kept(logits, sampling)
    (search,) = searches
    wide = (search.plan & filters.WIDE.value) != 0
    assert wide.tolist() == [expected == 64] * 5
    assert (search.count < filters.CAPACITY).all()


def test_a_sample_that_misleads_costs_time_alone(searches):
    """The sample is of more large logits, or of less mass, than the rest of the row."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, VOCAB, generator=generator).to(DEVICE)
    ids = ids_of_sample(VOCAB)
    logits[0, ids[:45]] += 10
    logits[1, ids] -= 20
    logits[1, ids[:10]] += 40
    sampling = params(2, temperature=4.0)
    sampling[1][0] = 50
    sampling[2][1] = 0.9
    check_kept(logits, sampling)
    (search,) = searches
    assert search.count[0] < 50
    assert search.count[1] < 50


def test_more_candidates_than_fit_read_the_row():
    """All logits but one are equal, so that no bound parts them; k is beyond the capacity."""
    logits = torch.zeros(3, VOCAB, device=DEVICE)
    logits[:, 7] = 1.0
    logits[2] = torch.linspace(0.0, 1e-3, VOCAB)
    sampling = params(3, temperature=2.0)
    sampling[1][:] = torch.tensor([0, 2, 6000])
    sampling[2][:] = torch.tensor([0.5, 1.0, 0.5])
    check_kept(logits, sampling)


def test_masked_rows_with_an_endless_temperature():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, VOCAB, generator=generator).to(DEVICE)
    logits[:, ::3] = -math.inf
    check_kept(logits, params(2, temperature=math.inf, top_p=0.25))
    check_kept(logits, params(2, temperature=math.inf, top_k=VOCAB - 1))


def test_launches_of_each_op(launches):
    """As many as the docstrings say."""
    logits = torch.randn(2, VOCAB, device=DEVICE)
    uniform = torch.rand(2, 2, device=DEVICE)
    cu_rows = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    draft = logits[None, :1]
    off, one = [None] * 4, params(1)
    chain = (logits, cu_rows, tokens, uniform[:1])
    nodes = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    tree = (logits, cu_rows, nodes, nodes, torch.rand(1, 3, device=DEVICE))
    logsumexp = logits[:1].logsumexp(-1, keepdim=True)
    for call, expected in (
        (lambda: ops.row_stats(logits, *off, None), 2),
        (lambda: ops.row_stats(logits, None, None, None, params(2)[3], None), 4),
        (lambda: ops.row_stats(logits[:, :99], *params(2), None), 4),
        (lambda: ops.row_stats(logits, *params(2), None), 7),
        (lambda: ops.sample(logits, uniform[0], *off, None), 2),
        (lambda: ops.sample_coupled(logits, nodes[0].long(), nodes[0].long(), *off, None), 3),
        (lambda: ops.logits_to_probs(logits, *off, None), 2),
        (lambda: ops.verify_chain(*chain, None, *off, 1.0, "standard", *[None] * 3), 3),
        (lambda: ops.verify_chain(*chain, draft, *off, 1.0, "standard", *[None] * 3), 4),
        (lambda: ops.verify_chain(*chain, draft, *off, 1.0, "block", *[None] * 3), 5),
        (lambda: ops.verify_chain(*chain, None, *off, 1.0, "block", *[None] * 3), 3),
        (lambda: ops.verify_chain(*chain, draft, *off, 1.0, "standard", logsumexp, None, None), 5),
        (lambda: ops.verify_chain(*chain, draft, *one, 1.0, "standard", *[None] * 3), 9),
        (lambda: ops.verify_tree(*tree, "target_only", None, *off, None, None), 2),
        (lambda: ops.build_tree(nodes), 1),
    ):
        launches.clear()
        call()
        assert len(launches) == expected, call


def test_ids_and_parents_out_of_range_are_not_followed():
    """Garbage where no border check looks on a GPU: the answer is that of no such child."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 40, generator=generator).to(DEVICE)
    cu_rows = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    large = 2**31 - 1
    tokens = torch.tensor([[large, -large, large, 40, -1, -large - 1]], dtype=torch.int32)
    parents = torch.tensor([[large, 0, 0, 2, -large, large]], dtype=torch.int32)
    case = (logits, cu_rows, tokens.to(DEVICE), parents.to(DEVICE))
    uniform = torch.rand(1, 7, generator=generator).to(DEVICE)
    path, output, accepted_len, _ = ops.verify_tree(
        *case, uniform, "target_only", None, *[None] * 6
    )
    assert accepted_len.tolist() == [0]
    assert (path == -1).all()
    assert 0 <= int(output[0, 0]) < 40
    depths, _ = ops.build_tree(case[3])
    assert depths.tolist() == [[0, 1, 1, 2, -1, -1]]


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_a_filter_of_nan_reads_nothing_that_was_not_written(monkeypatch, name):
    """It is off, and top-k is not."""

    def poisoned(*args):
        search = new_search(*args)
        values = {"plan": 1, "candidates": 50.0, "count": 1, "sampled": -1.0, "bracket": -1.0}
        for name, tensor in search._asdict().items():
            tensor.fill_(values.get(name, 0))
        return search

    new_search = filters._new_search
    monkeypatch.setattr(filters, "_new_search", poisoned)
    logits = torch.randn(2, VOCAB, device=DEVICE)
    values = params(2, top_k=3)
    values[("temperature", "top_k", "top_p", "min_p").index(name)].fill_(math.nan)
    found = ops.row_stats(logits, *values, None)[1]
    assert torch.equal(found, logits.topk(3).values[:, -1])


def test_penalize_leaves_rows_of_no_sequence_or_node_alone():
    """Garbage again; a parent that does not come first ends the path."""
    large = 2**31 - 1
    sequences, rows = [0, 1, -1, large, 0, 0], [1, 1, 0, 0, 7, -1]
    lists = [[0, 1], [3], [2], [0, 1], [4], [1.5], [9]]
    tensors = [
        torch.tensor(value, dtype=torch.float32 if value == [1.5] else torch.int32, device=DEVICE)
        for value in (sequences, rows, [[0, 5, 6]], *lists, [[large, large, 1]])
    ]
    logits = torch.ones(6, 40, device=DEVICE)
    ops.penalize(logits, *tensors, torch.full((1,), 2.0, device=DEVICE), None, None)
    expected = torch.ones(6, 40)
    expected[0, [3, 4, 5]] = torch.tensor([0.5, 2.5, 0.5])
    assert torch.equal(logits.cpu(), expected)
