"""The CUDA kernels that write to a paged cache, run thread by thread on the CPU."""

import pytest
import torch

from fastspec_kernels import reference

from ..kernels.test_compact_kv import bits, ints, moved_by_hand
from ..kernels.test_compact_kv import caches as layered_caches
from ..kernels.test_store_kv import caches, rotary
from . import emulated
from .emulated import Emulation
from .emulated_cache import compact_kv, store_kv

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORDERS = range(3)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
moved_dtypes = pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)


def check_store(key, value, key_cache, value_cache, slots, cos=None, sin=None):
    """Every bit of both caches as the reference leaves them, in every order of the threads."""
    expected = key_cache.clone(), value_cache.clone()
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    kept = torch.where(slots < num_slots, slots, -1)
    reference.store_kv(key, value, *expected, kept, cos, sin, 1.0, 1.0)
    before = key_cache.clone(), value_cache.clone()
    for order in ORDERS:
        key_cache.copy_(before[0])
        value_cache.copy_(before[1])
        emulation = Emulation(order=order)
        store_kv(emulation, key, value, key_cache, value_cache, slots, cos, sin)
        for cache, wanted in zip((key_cache, value_cache), expected, strict=True):
            assert torch.equal(bits(cache), bits(wanted))


@dtypes
@pytest.mark.parametrize(
    "slots", [[], [-1], [19, 3, -1, 7], [-(2**63), 20, 5, 2**40, 0], list(range(20))], ids=str
)
def test_store_writes_its_slots_only(slots, dtype):
    key, value = torch.randn(2, len(slots), 2, 8).to(dtype)
    check_store(key, value, *caches(dtype=dtype), torch.tensor(slots, dtype=torch.int64))


@dtypes
@pytest.mark.parametrize(
    ("num_heads", "head_size", "block_size"),
    [(1, 1, 1), (3, 5, 33), (8, 128, 16), (2, 80, 5), (40, 64, 2), (1, 256, 16)],
)
def test_store_sizes(num_heads, head_size, block_size, dtype):
    key, value = torch.randn(2, 3, num_heads, head_size).to(dtype)
    shape = {"num_heads": num_heads, "head_size": head_size, "block_size": block_size}
    check_store(key, value, *caches(dtype=dtype, **shape), torch.tensor([4, 0, 2]))


@dtypes
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_store_of_views(offset, dtype):
    """Heads first, a slice that starts anywhere, interleaved caches, caches that start anywhere."""
    heads_first = torch.randn(2, 3, 16).to(dtype).transpose(0, 1)
    fused = torch.randn(3, 6, 32).to(dtype)[:, 2:4, offset : offset + 16]
    slots = torch.tensor([5, 6, 7])
    both = torch.zeros(5, 2, 4, 2, 16, dtype=dtype)
    check_store(heads_first, fused, *both.unbind(1), slots)
    flat = torch.zeros(2, 640 + 16, dtype=dtype)[:, offset : offset + 640]
    check_store(fused, heads_first, *(half.view(5, 4, 2, 16) for half in flat), slots)


@dtypes
@pytest.mark.parametrize(
    ("head_size", "size"), [(8, 8), (8, 2), (80, 32), (128, 128), (64, 16), (5, 4), (96, 48)]
)
@pytest.mark.parametrize("same_dtype", [False, True])
def test_store_rotates(head_size, size, same_dtype, dtype):
    """Exactly as torch: each product and each sum is rounded to float32."""
    key, value = torch.randn(2, 6, 3, head_size).to(dtype)
    factors = rotary(6, size, dtype if same_dtype else torch.float32, equal_halves=False)
    slots = torch.tensor([3, -1, 0, 19, 4, 7])
    check_store(key, value, *caches(num_heads=3, head_size=head_size, dtype=dtype), slots, *factors)


def test_store_rotates_views():
    """Factors with padded rows, and rows that do not start at a multiple of 16 bytes."""
    key = torch.randn(2, 3, 32).transpose(0, 1)
    for first, width in ((0, 48), (1, 48), (0, 33)):
        padded = rotary(3, width, torch.float32, equal_halves=False)
        cos, sin = (factor[:, first : first + 32] for factor in padded)
        check_store(key, key, *caches(head_size=32), torch.tensor([5, 6, 7]), cos, sin)


def check_compact(key_caches, value_caches, *indices):
    expected = [moved_by_hand(cache, *indices) for cache in (key_caches, value_caches)]
    before = key_caches.clone(), value_caches.clone()
    for order in ORDERS:
        key_caches.copy_(before[0])
        value_caches.copy_(before[1])
        compact_kv(Emulation(order=order), key_caches, value_caches, *indices)
        for cache, wanted in zip((key_caches, value_caches), expected, strict=True):
            assert torch.equal(bits(cache), bits(wanted))


@moved_dtypes
@pytest.mark.parametrize("prefix", [0, 3, 6])
def test_compact_overlapping_moves_across_pages(prefix, dtype):
    table = ints([7, 2, 9, 0, 11, -1], [1, 8, 3, 10, 2**31 - 1, -1])
    path = ints([2, 3, 5, 8, -1], [1, 2, 3, 7, 9])
    case = layered_caches(dtype=dtype)
    check_compact(*case, table, ints([prefix, prefix])[0], path, ints([4, 5])[0])


def test_compact_where_a_place_has_no_block():
    """Of what moves there, or from there; the rest of the path moves."""
    table = ints([7, -1, 9, 0], [1, 8, -1, 10])
    path = ints([5, 6, 7, 8, 9], [2, 3, 6, 8, 9])
    check_compact(*layered_caches(), table, ints([3, 2])[0], path, ints([5, 5])[0])


@pytest.mark.parametrize("accepted_len", [[0, 0], [-1, 2], [5, -(2**31)], [1, 5]])
def test_compact_lengths(accepted_len):
    table = ints([7, 2, 9, 0], [1, 8, 3, 10])
    path = ints([2, 4, -1, 7, 8], [3, 4, 6, 8, 9])
    check_compact(*layered_caches(), table, ints([1, 2])[0], path, ints(accepted_len)[0])


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 23])
@pytest.mark.parametrize("step", [1, 2])
def test_compact_long_paths(length, step):
    """Several rounds of moves, of which later ones read what lies between the earlier ones."""
    path = torch.arange(2, 2 + step * length, step, dtype=torch.int32)[None]
    num_blocks = 14
    table = torch.randperm(num_blocks).to(torch.int32)[None]
    case = layered_caches(num_layers=2, num_blocks=num_blocks)
    check_compact(*case, table, ints([5])[0], path, ints([length])[0])


def test_compact_stops_where_a_long_path_ends():
    """What follows the first negative node does not move, in whatever round it would have."""
    path = torch.arange(2, 22, dtype=torch.int32)[None]
    path[0, 5] = -1
    table = torch.randperm(12).to(torch.int32)[None]
    check_compact(*layered_caches(), table, ints([5])[0], path, ints([20])[0])


@moved_dtypes
@pytest.mark.parametrize(("heads", "block_size"), [((1, 1), 1), ((3, 7), 5), ((8, 160), 16)])
def test_compact_sizes(heads, block_size, dtype):
    num_blocks = -(-24 // block_size)
    table = torch.randperm(num_blocks).to(torch.int32)[None]
    case = layered_caches(num_blocks=num_blocks, block_size=block_size, heads=heads, dtype=dtype)
    check_compact(*case, table, ints([5])[0], ints([2, 3, 7, 11, 18]), ints([5])[0])


def test_compact_strided_caches():
    """Keys and values, or layers, side by side in one tensor."""
    both = torch.randn(3, 12, 2, 4, 2, 8)
    indices = (ints([7, 2, 9]), ints([2])[0], ints([2, 4, 5]), ints([3])[0])
    check_compact(both[:, :, 0], both[:, :, 1], *indices)


def test_compact_leaves_shared_pages_alone():
    """Two sequences that share the blocks of their prefix: only blocks of their own change."""
    table = ints([4, 5, 0, 1], [4, 5, 2, 3])
    case = layered_caches(num_blocks=6)
    before = case[0].clone()
    check_compact(*case, table, ints([8, 9])[0], ints([3, 5], [2, 4]), ints([2, 2])[0])
    assert torch.equal(case[0][:, 4:], before[:, 4:])
    assert not torch.equal(case[0], before)


@pytest.mark.parametrize(
    "change",
    [
        {"prefix_lens": ints([-1])[0]},
        {"prefix_lens": ints([12])[0]},
        {"prefix_lens": ints([2**31 - 1])[0]},
        {"block_table": ints([-1, -1, -1])},
        {"block_table": ints([7, 12, 9])},
        {"block_table": ints([7, 2**31 - 1, -(2**31)])},
        {"path": ints([-1, 3, 5])},
    ],
)
def test_compact_leaves_out_places_without_a_slot(change):
    key_caches, value_caches = layered_caches()
    before = key_caches.clone()
    good = {
        "block_table": ints([7, 2, 9]),
        "prefix_lens": ints([2])[0],
        "path": ints([2, 3, 5]),
        "accepted_len": ints([2**31 - 1])[0],
    }
    compact_kv(Emulation(), key_caches, value_caches, *{**good, **change}.values())
    assert torch.equal(key_caches, before)
