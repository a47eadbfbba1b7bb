"""The CUDA kernel of penalize, run thread by thread on the CPU."""

import math

import pytest
import torch

from ..kernels.cases import DTYPES, ints
from ..kernels.test_penalize import PENALTIES, assert_same_bits, expected_row, random_case
from . import emulated
from .emulated import Emulation

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")


def check(case):
    """Every bit as it should be, in every order of the threads."""
    rows = [expected_row(case, row) for row in range(len(case["logits"]))]
    expected = torch.tensor([[float(x) for x in row] for row in rows]).to(case["logits"].dtype)
    for order in range(3):
        logits = torch.full((len(rows), expected.shape[1] + 3), 7.0, dtype=expected.dtype)
        view = logits[:, 1:-2].copy_(case["logits"])
        Emulation(order=order).penalize(**{**case, "logits": view})
        assert_same_bits(view, expected)
        assert (logits[:, 0] == 7).all()
        assert (logits[:, -2:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 40, 600])
def test_random_rows(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    case = random_case(generator, 12, vocab, dtype)
    check(case)
    check({**case, "parents": None, **dict.fromkeys(PENALTIES[vocab % 3 :])})


def test_more_of_everything_than_threads():
    """A path of 300 nodes, 400 tokens of history and as many of bias."""
    generator = torch.Generator().manual_seed(1)
    case = random_case(generator, 2, 800, num_nodes=301)
    ids = [torch.randperm(800, generator=generator)[:400].sort().values.int() for _ in range(2)]
    sums = ints(0, 400, 400, 400)
    check(
        {
            **case,
            "row_sequence": ints(0, 0),
            "row_node": ints(300, 0),
            "parents": None,
            "cu_history": sums,
            "history_ids": ids[0],
            "history_counts": ids[1] % 5,
            "cu_bias": sums,
            "bias_ids": ids[1],
            "bias": torch.randn(400, generator=generator),
            "bias_until": ids[0],
        }
    )


def test_rows_of_no_sequence_or_node_are_left_alone():
    large = 2**31 - 1
    logits = torch.zeros(5, 40)
    case = random_case(torch.Generator().manual_seed(2), 5, 40)
    case |= {"row_sequence": ints(3, -1, large, 0, 0), "row_node": ints(0, 0, 0, 7, -large)}
    Emulation().penalize(**{**case, "logits": logits})
    assert not logits.any()


def test_a_parent_that_does_not_come_first_ends_the_path():
    case = random_case(torch.Generator().manual_seed(3), 1, 40, num_nodes=3)
    case |= {
        "row_sequence": ints(1),
        "row_node": ints(2),
        "parents": ints([0, 2**31 - 1, 1]).repeat(3, 1),
    }
    expected = expected_row({**case, "parents": ints([0, 0, 1]).repeat(3, 1)}, 0)
    Emulation().penalize(**case)
    found = case["logits"][0].tolist()
    assert all(
        math.isnan(a) if math.isnan(b) else a == b for a, b in zip(found, expected, strict=True)
    )
