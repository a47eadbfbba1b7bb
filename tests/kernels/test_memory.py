"""Ops give back what they take, however often they are called."""

from pathlib import Path

import pytest
import torch

import fastspec_kernels as kernels
from fastspec_kernels.library import HAS_CPU_EXTENSION

STATM = Path("/proc/self/statm")
CALLS = 12_000
IDS = torch.zeros((2, 3), dtype=torch.int32)
LOGITS, CU_ROWS = torch.zeros(8, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
PARENTS = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32)
OPS = {
    "verify_chain": lambda: kernels.verify_chain(
        LOGITS, CU_ROWS, IDS, torch.zeros(2, 4), method="standard"
    ),
    "verify_tree": lambda: kernels.verify_tree(
        LOGITS, CU_ROWS, PARENTS, PARENTS, torch.zeros(2, 5), sibling_rule="target_only"
    ),
    "match_suffix": lambda: kernels.match_suffix(
        IDS, torch.tensor([3, 3], dtype=torch.int32), min_match=1, max_match=2, num_tokens=2,
        rule="earliest_longest",
    ),
    "sample": lambda: kernels.sample(LOGITS, LOGITS[:, 0]),
}  # fmt: skip


@pytest.mark.skipif(not HAS_CPU_EXTENSION, reason="the extension is not built")
@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell")
@pytest.mark.parametrize("op", OPS)
def test_memory_does_not_grow(op):
    """Of texts torch's stable ABI keeps a copy for ever, unless the bindings take care."""
    pages = []
    for count in (2_000, CALLS):
        for _ in range(count):
            OPS[op]()
        pages.append(int(STATM.read_text().split()[1]))
    assert (pages[1] - pages[0]) * 4096 < 16 * CALLS
