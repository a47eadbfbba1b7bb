"""compact_kv moves accepted nodes to the places of their tokens and touches nothing else."""

import pytest
import torch

from fastspec_kernels import compact_kv, store_kv, tree_attention

from .cases import backends_of, device_of, ints
from .paged import random_trees

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
backends = pytest.mark.parametrize("backend", backends_of("compact_kv"))


def caches(num_layers=3, num_blocks=12, block_size=4, heads=(2, 8), dtype=torch.float32):
    return torch.randn(2, num_layers, num_blocks, block_size, *heads).to(dtype).unbind(0)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int8)


def moved_by_hand(cache, block_table, prefix_lens, path, accepted_len):
    """The definition, one node at a time, read from the cache as it was."""
    after, block_size = cache.clone(), cache.shape[2]
    for b, length in enumerate(accepted_len.tolist()):
        for i in range(length):
            node, prefix = int(path[b, i]), int(prefix_lens[b])
            if node < 0:
                break
            (block, slot), (new_block, new_slot) = (
                (int(block_table[b, place // block_size]), place % block_size)
                for place in (prefix + node, prefix + 1 + i)
            )
            if min(block, new_block) >= 0:
                after[:, new_block, new_slot] = cache[:, block, slot]
    return after


def check(backend, key_caches, value_caches, *indices):
    expected = [moved_by_hand(cache, *indices) for cache in (key_caches, value_caches)]
    device = device_of(backend)
    moved = [cache.to(device) for cache in (key_caches, value_caches)]
    indices = [index.to(device) for index in indices]
    assert compact_kv(*moved, *indices, backend=backend) is None
    for cache, wanted in zip(moved, expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [0, 3, 6])
def test_overlapping_moves_across_pages(backend, dtype, prefix):
    table = ints([7, 2, 9, 0, 11, -1], [1, 8, 3, 10, 2**31 - 1, -1])
    path = ints([2, 3, 5, 8, -1], [1, 2, 3, 7, 9])
    check(backend, *caches(dtype=dtype), table, ints([prefix, prefix])[0], path, ints([4, 5])[0])


@backends
@pytest.mark.parametrize("accepted_len", [[0, 0], [-1, 2], [5, -(2**31)], [1, 5]])
def test_lengths(backend, accepted_len):
    table = ints([7, 2, 9, 0], [1, 8, 3, 10])
    path = ints([2, 4, 5, 7, 8], [3, 4, 6, 8, 9])
    check(backend, *caches(), table, ints([1, 2])[0], path, ints(accepted_len)[0])


@backends
def test_a_negative_node_ends_the_path(backend):
    table = ints([7, 2, 9, 0], [1, 8, 3, 10])
    path = ints([2, -1, 5, 7], [-5, 3, 4, 6])
    check(backend, *caches(), table, ints([1, 2])[0], path, ints([4, 4])[0])


@backends
def test_sequences_that_take_no_part_may_hold_anything(backend):
    table = ints([-1, -1, -1, -1], [1, 8, 3, 10])
    path = ints([2**31 - 1] * 3, [2, 3, -7])
    check(backend, *caches(), table, ints([-9, 2])[0], path, ints([0, 2])[0])


@backends
@pytest.mark.parametrize(
    ("heads", "block_size"), [((1, 1), 1), ((3, 5), 7), ((8, 128), 16), ((2, 80), 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_sizes(backend, heads, block_size, dtype):
    length = 24
    num_blocks = -(-length // block_size)
    table = torch.randperm(num_blocks).to(torch.int32)[None]
    case = caches(num_blocks=num_blocks, block_size=block_size, heads=heads, dtype=dtype)
    check(backend, *case, table, ints([5])[0], ints([2, 3, 7, 11, 18]), ints([5])[0])


@backends
def test_many_layers_and_sequences(backend):
    """Enough bytes for several threads."""
    table = torch.randperm(64).to(torch.int32).view(8, 8)
    path = torch.stack([torch.randperm(15)[:6].sort().values + 1 for _ in range(8)])
    case = caches(num_layers=8, num_blocks=64, heads=(4, 64))
    lengths = torch.randint(0, 7, (8,), dtype=torch.int32)
    check(backend, *case, table, torch.arange(8, dtype=torch.int32), path.int(), lengths)


@backends
def test_no_sequences_or_layers(backend):
    nothing = torch.zeros(0, dtype=torch.int32)
    check(backend, *caches(), nothing.view(0, 4), nothing, nothing.view(0, 3), nothing)
    check(backend, *caches(num_layers=0), ints([0, 1]), ints([1])[0], ints([2]), ints([1])[0])
    check(backend, *caches(), ints([0, 1]), ints([1])[0], nothing.view(1, 0), ints([0])[0])


@backends
def test_strided_caches(backend):
    """Keys and values, or layers, side by side in one tensor."""
    both = torch.randn(3, 12, 2, 4, 2, 8).to(device_of(backend))
    expected = both.clone()
    indices = (ints([7, 2, 9]), ints([2])[0], ints([2, 4, 5]), ints([3])[0])
    for side in range(2):
        expected[:, :, side] = moved_by_hand(both[:, :, side], *indices)
    moved = [index.to(both.device) for index in indices]
    compact_kv(both[:, :, 0], both[:, :, 1], *moved, backend=backend)
    assert torch.equal(both, expected)


@backends
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_tree_round_leaves_what_a_chain_would(backend, block_size):
    """For every accepted length: store a tree, compact, and find the path as if stored directly."""
    device, prefix, num_nodes = device_of(backend), 21, 12
    length = prefix + num_nodes
    num_blocks = -(-length // block_size)
    table = torch.randperm(num_blocks).to(torch.int32)[None].to(device)
    parents = random_trees(1, num_nodes)[0].tolist()
    path, node = [], num_nodes - 1
    while node > 0:
        path, node = [node, *path], parents[node]
    keys, values = torch.randn(2, length, 2, 16, device=device)

    def stored(places, tokens):
        """One layer's caches with the keys and values of these tokens at these places."""
        shape = (1, num_blocks, block_size, 2, 16)
        key_cache, value_cache = (torch.full(shape, torch.nan, device=device) for _ in range(2))
        places = torch.tensor(places, device=device)
        slots = table[0, places // block_size].long() * block_size + places % block_size
        store_kv(keys[tokens], values[tokens], key_cache[0], value_cache[0], slots, backend=backend)
        return key_cache, value_cache

    for accepted in range(len(path) + 1):
        tree = stored(list(range(length)), list(range(length)))
        padded = torch.tensor([path + [-1] * (num_nodes - len(path))], dtype=torch.int32)
        indices = (ints([prefix])[0], padded, ints([accepted])[0])
        compact_kv(*tree, table, *(index.to(device) for index in indices), backend=backend)
        committed = prefix + 1 + accepted
        tokens = [*range(prefix + 1), *(prefix + node for node in path[:accepted])]
        chain = stored(list(range(committed)), tokens)
        places = torch.arange(committed, device=device)
        blocks, slots = table[0, places // block_size].long(), places % block_size
        for ours, expected in zip(tree, chain, strict=True):
            assert torch.equal(ours[:, blocks, slots], expected[:, blocks, slots])
        lens = [ints([committed])[0].to(device), ints([0, 1])[0].to(device)]
        query = torch.randn(1, 4, 16, device=device)
        next_step = [
            tree_attention(query, key[0], value[0], table, *lens) for key, value in (tree, chain)
        ]
        assert torch.equal(*next_step)


HOSTILE = [
    ("accepted_len", {"accepted_len": ints([4])[0]}),
    ("accepted_len", {"accepted_len": ints([2**31 - 1])[0]}),
    ("prefix_lens", {"prefix_lens": ints([-1])[0]}),
    ("prefix_lens", {"prefix_lens": ints([8])[0]}),
    ("prefix_lens", {"prefix_lens": ints([2**31 - 1])[0]}),
    ("prefix_lens", {"path": ints([2, 3, 2**31 - 1])}),
    ("block_table", {"block_table": ints([7, -1, 9])}),
    ("block_table", {"block_table": ints([7, 12, 9])}),
]


@backends
@pytest.mark.parametrize(("name", "change"), HOSTILE)
def test_places_without_a_slot_write_nothing(backend, name, change):
    if device_of(backend) != "cpu":
        pytest.skip("places are read back on the CPU only")
    key_caches, value_caches = caches()
    before = key_caches.clone(), value_caches.clone()
    good = {
        "block_table": ints([7, 2, 9]),
        "prefix_lens": ints([2])[0],
        "path": ints([2, 3, 5]),
        "accepted_len": ints([3])[0],
    }
    with pytest.raises(ValueError, match=f"^{name}"):
        compact_kv(key_caches, value_caches, **{**good, **change}, backend=backend)
    assert torch.equal(key_caches, before[0])
    assert torch.equal(value_caches, before[1])


@backends
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key_caches", lambda cache: cache[0]),
        ("key_caches", lambda cache: cache.double()),
        ("key_caches", lambda cache: cache.transpose(3, 4).contiguous().transpose(3, 4)),
        ("key_caches", lambda cache: None),
        ("value_caches", lambda cache: cache.half()),
        ("value_caches", lambda cache: cache[:2]),
        ("value_caches", lambda cache: torch.cat([cache, cache], 1)[:, ::2]),
        ("block_table", lambda table: table.long()),
        ("block_table", lambda table: table[0]),
        ("prefix_lens", lambda lens: lens.long()),
        ("prefix_lens", lambda lens: lens.repeat(2)),
        ("path", lambda path: path.long()),
        ("path", lambda path: path.repeat(2, 1)),
        ("path", lambda path: path.repeat_interleave(2, 1)[:, ::2]),
        ("accepted_len", lambda lens: lens[None]),
        ("accepted_len", lambda lens: lens.to("meta")),
    ],
)
def test_wrong_arguments(backend, name, change):
    names = ["key_caches", "value_caches", "block_table", "prefix_lens", "path", "accepted_len"]
    values = (*caches(), ints([7, 2, 9]), ints([2])[0], ints([2, 3, 5]), ints([3])[0])
    good = dict(zip(names, values, strict=True))
    with pytest.raises(ValueError, match=f"^{name}"):
        compact_kv(**{**good, name: change(good[name])}, backend=backend)


def test_opcheck():
    arguments = (*caches(), ints([7, 2, 9]), ints([2])[0], ints([2, 3, 5]), ints([3])[0])
    torch.library.opcheck(torch.ops.fastspec.compact_kv.default, arguments)
