"""How csrc/cuda reads a row, filters it and draws from it, run thread by thread on the CPU.

A tree of one node is one draw from its row: verify_tree has nothing to judge there.
"""

import math
import mmap

import pytest
import torch

from fastspec_kernels.checks import MAX_GPU_VOCAB

from ..kernels.cases import (
    DTYPES,
    ints,
    invalid_rows,
    random_bitmask,
    random_logits,
    random_params,
    uniform_samples,
)
from . import emulated
from .emulated import PLANS, Emulation, library, plan_id, same
from .test_emulated_tree import check, run

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")


def draws(logits, samples, **params):
    """A tree of one node for each row of logits."""
    num = len(logits)
    return {
        "target_logits": logits,
        "cu_rows": torch.arange(num + 1, dtype=torch.int32),
        "tree_token_ids": torch.zeros(num, 1, dtype=torch.int32),
        "parents": torch.full((num, 1), -1, dtype=torch.int32),
        "uniform_samples": torch.stack([torch.zeros(num), samples], dim=1),
        "sibling_rule": "target_only",
        **params,
    }


def several_draws(num_rows, vocab, dtype, generator):
    """Four draws from each of some rows of every kind, under the same parameters."""
    params = random_params(num_rows, vocab, generator)
    params = {name: value.repeat(4) for name, value in params.items()}
    logits = random_logits(num_rows, vocab, generator, dtype).repeat(4, 1)
    return draws(logits, uniform_samples((4 * num_rows,), generator), **params)


def kept(row, emulation, **params):
    """Which tokens are ever drawn from a row, each of whose kept ones has more than 1/256."""
    samples = (torch.arange(256) + 0.5) / 256
    given = {name: value.repeat(256) for name, value in params.items()}
    _, token_ids, _, _ = run(emulation, draws(torch.tensor([row]).repeat(256, 1), samples, **given))
    return sorted(set(token_ids.flatten().tolist()))


@pytest.mark.parametrize("emulation", PLANS, ids=plan_id)
@pytest.mark.parametrize("vocab", [1, 3, 33, 257])
def test_small_vocabularies(emulation, vocab):
    generator = torch.Generator().manual_seed(vocab)
    cases = [several_draws(24, vocab, dtype, generator) for dtype in DTYPES]
    close = sum(check(emulation, case) for case in cases)
    assert close <= 3 * 96 / 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4099, 12289])
def test_every_plan_and_order_gives_the_same_bits(vocab, dtype):
    """Also under a mask, and whatever the alignment of the first row is."""
    generator = torch.Generator().manual_seed(vocab)
    case = several_draws(8, vocab, dtype, generator)
    logits = case["target_logits"]
    case["token_bitmask"] = random_bitmask(logits, generator)
    expected = run(PLANS[0], case)
    assert check(PLANS[0], case) <= 8  # the draws of two rows
    for emulation in PLANS[1:]:
        assert same(run(emulation, case), expected), plan_id(emulation)
    moved = torch.full((32, vocab + 16), math.nan, dtype=dtype)[:, 7 : vocab + 7].copy_(logits)
    assert same(run(PLANS[2], {**case, "target_logits": moved}), expected)


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_invalid_rows_and_parameters(emulation):
    for vocab in (5, 300):
        rows = torch.cat([invalid_rows(vocab), torch.zeros(3, vocab)])
        temperature = torch.tensor([1.0, 1, 1, -1, math.nan, 1])
        params = {"temperature": temperature, "top_p": torch.full((6,), 0.5)}
        case = draws(rows, torch.full((6,), 0.351), **params)
        assert check(emulation, case) == 0
        assert run(emulation, case)[2].tolist() == [-1] * 5 + [0]


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_ties_are_kept_together(emulation):
    row = [2.0, 1.0, 1.0, -0.0, 0.0, -1.0]
    for top_k, num in ((1, 1), (2, 3), (3, 3), (4, 5), (5, 5), (6, 6)):
        assert kept(row, emulation, top_k=ints(top_k)) == list(range(num)), top_k


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_top_p_bound_is_exclusive(emulation):
    """The weights are 1, 1/2, 1/4 and 1/4 exactly: half of the mass lies above the second one."""
    row, temperature = [0.0, -1.0, -2.0, -2.0], torch.tensor([1 / math.log(2)])
    for share, num in ((0.25, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1e-30, 1)):
        found = kept(row, emulation, temperature=temperature, top_p=torch.tensor([share]))
        assert found == list(range(num)), share


def test_shared_memory_is_asked_for_once_on_each_device():
    """A smaller row must not take away what a larger one is about to be launched with."""
    try:
        for device in (0, 1):
            library().emulated_device(device)
            for vocab in (40000, 30000, 50000):
                case = draws(torch.zeros(1, vocab, dtype=torch.bfloat16), torch.zeros(1))
                *_, logprobs = run(Emulation(1, 64), case)
                assert logprobs.item() == pytest.approx(-math.log(vocab))
    finally:
        library().emulated_device(0)


def test_the_largest_vocabulary_has_room_for_equal_weights():
    """One token more would make the sum of its weights 2**64."""
    case = draws(torch.zeros(1, MAX_GPU_VOCAB, dtype=torch.float16), torch.zeros(1))
    *_, logprobs = run(Emulation(1, 32, staged=False), case)
    assert logprobs.item() == pytest.approx(-math.log(MAX_GPU_VOCAB))


def test_distant_rows_are_addressed_in_64_bits():
    """The second row starts 2^32 elements after the first, in memory that is never touched."""
    vocab, stride = 40, 2**32
    no_reserve = 0x4000  # Linux; Python has no name for it before 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, 2 * (stride + vocab), flags=flags)
    logits = torch.frombuffer(memory, dtype=torch.float16).as_strided((2, vocab), (stride, 1))
    logits[1] = torch.arange(vocab)
    case = draws(logits, torch.zeros(2), temperature=torch.zeros(2))
    assert run(Emulation(), case)[1].tolist() == [[0], [vocab - 1]]
