"""Who computes what of a batch in Triton's attention, which the lengths on the device decide."""

from itertools import pairwise

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

import triton.language as tl  # noqa: E402

from fastspec_kernels import cross_attention, tree_attention  # noqa: E402
from fastspec_kernels.triton import attention  # noqa: E402
from fastspec_kernels.triton.attention_shares import share_of_program  # noqa: E402

from ..kernels.paged import paged  # noqa: E402
from .test_attention import check, random_trees, row_of  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/kernels runs the compiled kernels"
)
FIELDS = 7


@triton.jit
def shares_kernel(found, context_lens, cu_rows, batch, capacity, window, programs, room, V):
    lengths = (context_lens, cu_rows, batch, capacity, window)
    values = share_of_program(lengths, programs, room, V)
    for field in tl.static_range(7):
        tl.store(found + tl.program_id(0) * 7 + field, values[field])


def shares_of(
    lengths: list[int],
    tokens: list[int],
    *,
    rows: str = "few",
    group: int = 4,
    num_kv_heads: int = 8,
    capacity: int = 2**17,
    window: int = 0,
    room: int | None = None,
) -> list[tuple[int, ...]]:
    """What the programs of one KV head find that have something to do, and the room."""
    num_heads = group * num_kv_heads
    wanted = attention.PROGRAMS_WANTED // num_kv_heads
    tiles: dict = attention.tiles(rows, 128, 2)
    num_tiles = sum(tokens) * group // 64 + len(tokens)
    sizes = num_tiles, wanted, sum(tokens) * num_heads, 128, capacity
    room = attention.room_for_partials(*sizes) if room is None else room
    off: dict = dict.fromkeys(("capped", "sinks", "logsumexp", "long_blocks"), False)
    variant = attention.variant_of(
        mask="chain", words=1, windowed=window > 0, split=True, num_heads=num_heads, group=group,
        head_size=128, block_size=16, few_rows=32, interpreted=True, dot_dtype=tl.float32,
        float8="no", **off, **tiles,
    )  # fmt: skip
    num_rows, block_m = sum(tokens) * group, tiles["block_m"]
    num_shares = attention.most_shares(rows, len(lengths), num_rows, block_m, wanted)
    cu_rows = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    found = torch.full((num_shares + 1, FIELDS), -1, dtype=torch.int64)
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    shares_kernel[(num_shares + 1,)](
        found, context_lens, cu_rows, len(lengths), capacity, window, wanted, room, V=variant
    )
    assert found[-1, 0] >= len(lengths)  # the grid is wide enough
    return [tuple(row) for row in found.tolist() if row[0] < len(lengths)]


def random_batch(batch: int, most_tokens: int) -> tuple[list[int], list[int]]:
    lengths = (torch.rand(batch).pow(6) * 2**17).long().clamp(min=1)
    lengths[torch.rand(batch) < 0.1] = 0
    tokens = torch.randint(0, most_tokens + 1, (batch,)).minimum(lengths)
    return lengths.tolist(), tokens.tolist()


@pytest.mark.check
@pytest.mark.parametrize("window", [0, 5000])
@pytest.mark.parametrize(("rows", "most"), [("few", 8), ("many", 40), ("all", 20)])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_each_part_has_one_program(batch, rows, most, window):
    """Every tile of every sequence, all its parts, and partials of its own if there are several."""
    lengths, tokens = random_batch(batch, most)
    block_m = attention.tiles(rows, 128, 2)["block_m"]
    seen: dict[tuple[int, int], list[int]] = {}
    ranges = {}
    for b, tile, part, parts, unit, length, base in shares_of(
        lengths, tokens, rows=rows, window=window
    ):
        seen.setdefault((b, tile), []).append(part)
        ranges[b] = (base, base + tokens[b] * 32 * length)
        assert 0 <= part < parts
        chunk = 256 if rows == "few" else 512
        assert unit == 1024 if parts == 1 else unit in (chunk, 1024)
        assert (length == 0) == (parts == 1)
    wanted = [
        (b, tile)
        for b, count in enumerate(tokens)
        if rows == "all" or (count * 4 <= 32) == (rows == "few")
        for tile in range(-(-count * 4 // block_m))
    ]
    assert sorted(seen) == wanted
    assert all(parts == list(range(len(parts))) for parts in seen.values())
    ends = sorted(ranges.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_a_long_sequence_in_a_large_batch_has_many_programs():
    """64 trees of 16 tokens, whose own partials alone take 17 MB."""
    parts_of = {}
    for b, _, _, parts, *_ in shares_of([2**17] + [1024] * 63, [16] * 64, rows="many"):
        parts_of[b] = parts
    assert parts_of[0] >= 16  # each has a program for every KV head
    assert {parts_of[b] for b in range(1, 64)} == {1}


@pytest.mark.parametrize(
    ("lengths", "tokens", "num_kv_heads"),
    [([6144], [33], 8), ([9216], [17], 8), ([2**17], [17], 8), ([12288, 100], [34, 34], 4)],
)
def test_tiles_of_64_rows_have_programs_enough(lengths, tokens, num_kv_heads):
    """However full the last of them is."""
    found = shares_of(lengths, tokens, rows="many", num_kv_heads=num_kv_heads)
    assert {row[0] for row in found} == {*range(len(lengths))}
    parts = {(row[0], row[1]): row[3] for row in found}
    assert len(found) == sum(parts.values())
    assert len(parts) == sum(-(-count * 4 // 64) for count in tokens)


@pytest.mark.parametrize(
    ("lengths", "most_keys", "programs"),
    [
        ([2**17] + [1024] * 31, 5120, 26 + 31),  # one program had all 131072
        ([2**17], 4096, 32),
        ([32768], 1024, 32),
        ([576], 256, 3),
        ([8192] * 8, 2048, 32),
        ([1024] * 63 + [16384], 3072, 63 + 6),
        ([16384] * 64, 16384, 64),  # nobody shares, and nothing is merged
    ],
    ids=["one of 32", "alone", "by chunks", "short", "a few", "of 64", "all alike"],
)
def test_long_sequences_take_more_programs(lengths, most_keys, programs):
    found = shares_of(lengths, [5] * len(lengths))
    assert len(found) == programs
    assert max(-(-lengths[b] // parts) for b, _, _, parts, *_ in found) <= most_keys


def test_what_has_no_room_is_not_shared():
    lengths, tokens = [2**15, 2**15, 2**15], [5, 5, 5]
    need = 5 * 32 * 33
    parts = {f[0]: f[3] for f in shares_of(lengths, tokens, room=2 * need)}
    assert parts[0] == parts[1] > 1
    assert parts[2] == 1


RAGGED = [4200, 1, 700, 2049, 0, 64]


@pytest.mark.check
@pytest.mark.parametrize("mask", ["chain", "window", "tree", "cross"])
def test_a_ragged_batch_is_right_and_keeps_its_bits(monkeypatch, fixed_order_products, mask):
    """However its sequences are shared, among poisoned pages: by one chunk or several, runs, or not
    at all."""
    monkeypatch.setattr(attention, "LONG", 0)
    case = paged(RAGGED, [3, 1, 3, 2, 0, 3], num_kv_heads=1, block_size=64)
    options: dict = {"window": {"sliding_window": 2500}}.get(mask, {})
    if mask == "tree":
        options = {"ancestor_mask": random_trees(len(RAGGED), 3)}
    op = cross_attention if mask == "cross" else tree_attention
    found = []
    for programs in (3, 12, 64):
        monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
        found.append(op(*case.tensors, backend="triton", **options))
    monkeypatch.setattr(attention, "LONG", 2**20)
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", 1)
    found.append(check(case, op, **options))
    for other in found[:-1]:
        assert torch.equal(other, found[-1])


@pytest.mark.check
def test_a_long_row_of_many_has_the_bits_of_one_alone(monkeypatch, fixed_order_products):
    """Tiles of 64 rows, sequences of both kinds, the first one longer than two runs."""
    monkeypatch.setattr(attention, "LONG", 0)
    lengths, tokens = [4200, 90, 600], [20, 2, 40]
    case = paged(lengths, tokens, num_kv_heads=1, block_size=64)
    found = []
    for programs in (1, 4, 64):
        monkeypatch.setattr(attention, "PROGRAMS_WANTED", programs)
        found.append(check(case, return_logsumexp=True))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for b in range(3):
        alone = row_of(case, b, tokens[b], lengths[b] - 1)
        out = tree_attention(*alone.tensors, backend="triton")
        assert torch.equal(out, found[0][case.cu_rows[b] : case.cu_rows[b + 1]])
