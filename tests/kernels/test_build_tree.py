"""build_tree against the oracle."""

import pytest
import torch

from fastspec_kernels import build_tree

from .cases import affordable, backends_of, device_of
from .oracle_tree import ancestors
from .tree_cases import random_parents

BACKENDS = backends_of("build_tree")


def run(parents, backend):
    depths, mask = build_tree(parents.to(device_of(backend)), backend=backend)
    assert (depths.dtype, mask.dtype) == (torch.int32, torch.int64)
    assert mask.shape == (*parents.shape, (parents.shape[1] + 63) // 64)
    return depths.cpu(), mask.cpu()


def check(parents, backend):
    depths, mask = run(parents, backend)
    for b, row in enumerate(parents.tolist()):
        for node, chain in enumerate(ancestors(row)):
            assert depths[b, node] == (-1 if chain is None else len(chain) - 1)
            words = [word % 2**64 for word in mask[b, node].tolist()]
            bits = sum(word << (64 * index) for index, word in enumerate(words))
            assert bits == sum(1 << j for j in chain or [])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 31, 63, 64, 65, 100, 128, 129, 200])
def test_random_trees(backend, num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    check(random_parents(affordable(backend, 32), num_nodes, generator), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_sees_everything_before(backend):
    depths, mask = run(torch.arange(-1, 69, dtype=torch.int32)[None], backend)
    assert depths[0].tolist() == list(range(70))
    assert mask[0, 62].tolist() == [2**63 - 1, 0]
    assert mask[0, 63].tolist() == [-1, 0]  # the sign bit is node 63
    assert mask[0, 69].tolist() == [-1, 0b111111]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_hangs_on_padding_is_absent(backend):
    depths, mask = run(torch.tensor([[-1, -1, 1, 0, 2]], dtype=torch.int32), backend)
    assert depths.tolist() == [[0, -1, -1, 1, -1]]
    assert mask[0, :, 0].tolist() == [0b1, 0, 0, 0b1001, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_parent_of_the_root_is_not_read(backend):
    for root in (0, 5, -7, 2**31 - 1):
        depths, mask = run(torch.tensor([[root, 0]], dtype=torch.int32), backend)
        assert depths.tolist() == [[0, 1]]
        assert mask[0, :, 0].tolist() == [0b1, 0b11]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0)])
def test_nothing_to_build(backend, shape):
    depths, mask = run(torch.zeros(shape, dtype=torch.int32), backend)
    assert depths.shape == shape
    assert mask.numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in BACKENDS if device_of(name) == "cuda"])
def test_a_wrong_parent_on_a_gpu_is_padding(backend):
    """No check on the host, and nothing read out of bounds."""
    parents = torch.tensor([[-1, 0, 2, 7, -9, 2**31 - 1, 1]], dtype=torch.int32)
    check(parents, backend)
