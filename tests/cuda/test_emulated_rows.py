"""The CUDA kernels of the row ops, run thread by thread on the CPU, against the oracle."""

import math
import mmap

import numpy as np
import pytest
import torch

from fastspec_kernels import reference
from fastspec_kernels.checks import MAX_GPU_VOCAB

from ..kernels import oracle
from ..kernels.cases import (
    DTYPES,
    invalid_rows,
    random_bitmask,
    random_logits,
    random_params,
    uniform_samples,
)
from ..kernels.test_sample_coupled import check_outputs, keys_of
from . import emulated
from .emulated import Emulation, library

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")

MARGIN = 1e-5
PLANS = [
    Emulation(1, 32, staged=False),
    Emulation(1, 96, staged=True, order=1),
    Emulation(2, 64, staged=True, order=2),
    Emulation(4, 64, staged=False, order=3),
    Emulation(8, 32, staged=True, order=1),
]


def plan_id(emulation):
    plan = emulation.plan
    return f"{plan.cluster}x{plan.threads}{'-staged' if plan.staged else ''}"


def run_all(emulation, logits, samples, params, bitmask=None):
    """Everything the three ops say of the rows."""
    arguments = *params.values(), bitmask
    return (
        *emulation.row_stats(logits, *arguments),
        emulation.logits_to_probs(logits, *arguments),
        *emulation.sample(logits, samples, *arguments),
    )


def check_rows(outputs, logits, samples, params, bitmask=None):
    """Compare every row with the oracle; returns how many were too close to call."""
    close = 0
    for index in range(len(logits)):
        row_params = {name: value[index].item() for name, value in params.items()}
        mask = None if bitmask is None else bitmask[index].numpy()
        expected = oracle.row(logits[index].double().numpy(), **row_params, bitmask=mask)
        found = [output[index] for output in outputs]
        if expected is None:
            assert all(found[i].isnan().all() for i in (0, 1, 2, 4)), row_params
            assert found[3] == -1
        elif expected.margin < MARGIN:
            close += 1
        else:
            close += check_row(found, expected, logits[index], samples[index].item(), row_params)
    return close


def check_row(found, expected, logits, sample, params):
    logsumexp, threshold, probs, token, logprob = (output.numpy() for output in found)
    x = logits.double().numpy()
    finite = np.isfinite(x) & (expected.logprobs > -np.inf)
    assert (x[finite & expected.kept] >= threshold).all(), params
    assert not (x[finite & ~expected.kept] >= threshold).any(), params
    whole = np.float32(expected.logsumexp)
    np.testing.assert_allclose(logsumexp, whole, rtol=1e-6, atol=1e-5, err_msg=str(params))
    np.testing.assert_allclose(probs, expected.probs, rtol=2e-5, atol=1e-7, err_msg=str(params))
    assert (probs[expected.probs == 0] == 0).all(), params
    drawn = oracle.draw(expected.probs, sample)
    if params.get("temperature") != 0 and drawn.margin < MARGIN:
        return 1
    assert token == drawn.token, params
    exact = expected.logprobs[drawn.token]
    np.testing.assert_allclose(logprob, exact, rtol=1e-5, atol=1e-5, err_msg=str(params))
    return 0


def same(one, other):
    """Bit by bit, also where there is NaN."""
    pairs = zip(one, other, strict=True)
    return all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize("emulation", PLANS, ids=plan_id)
@pytest.mark.parametrize("vocab", [1, 3, 33, 257])
def test_small_vocabularies(emulation, vocab):
    generator = torch.Generator().manual_seed(vocab)
    close = rows = 0
    for dtype in DTYPES:
        logits = random_logits(24, vocab, generator, dtype)
        params = random_params(24, vocab, generator)
        samples = uniform_samples((24,), generator)
        outputs = run_all(emulation, logits, samples, params)
        close += check_rows(outputs, logits, samples, params)
        rows += 24
    assert close <= rows / 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4099, 12289])
def test_every_plan_and_order_gives_the_same_bits(vocab, dtype):
    """Also under a mask, and whatever the alignment of the first row is."""
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(8, vocab, generator, dtype)
    params, samples = random_params(8, vocab, generator), uniform_samples((8,), generator)
    bitmask = random_bitmask(logits, generator)
    expected = None
    for emulation in PLANS:
        outputs = run_all(emulation, logits, samples, params, bitmask)
        if expected is None:
            check_rows(outputs, logits, samples, params, bitmask)
            expected = outputs
        assert same(outputs, expected), plan_id(emulation)
    moved = torch.full((8, vocab + 16), math.nan, dtype=dtype)[:, 7 : vocab + 7].copy_(logits)
    assert same(run_all(PLANS[2], moved, samples, params, bitmask), expected)


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_invalid_rows_and_parameters(emulation):
    for vocab in (5, 300):
        rows = invalid_rows(vocab)
        rows = torch.cat([rows, torch.zeros(2, vocab)])
        params = {
            "temperature": torch.tensor([1.0, 1, 1, -1, math.nan]),
            "top_k": torch.zeros(5, dtype=torch.int32),
            "top_p": torch.full((5,), 0.5),
            "min_p": torch.zeros(5),
        }
        samples = torch.full((5,), 0.5)
        outputs = run_all(emulation, rows, samples, params)
        check_rows(outputs, rows, samples, params)


@pytest.mark.parametrize("vocab", [1, 33, 259, 4099])
def test_sample_coupled(vocab):
    """Every plan and order of the threads gives the same bits."""
    generator = torch.Generator().manual_seed(vocab)
    num_rows = 24 if vocab < 1000 else 8
    keys = keys_of(num_rows)
    for dtype in DTYPES[: 3 if vocab < 1000 else 1]:
        logits = random_logits(num_rows, vocab, generator, dtype)
        logits[2:5] = invalid_rows(vocab) if dtype == torch.float32 else logits[2:5]
        params = random_params(num_rows, vocab, generator)
        params["token_bitmask"] = random_bitmask(logits, generator)
        outputs = [emulation.sample_coupled(logits, *keys, *params.values()) for emulation in PLANS]
        assert all(same(found, outputs[0]) for found in outputs)
        lists = [found.tolist() for found in outputs[0]]
        assert check_outputs(lists, logits, keys, params, "cuda") <= 4 + num_rows // 4


def test_ties_are_kept_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, -0.0, 0.0, -1.0]])
    for top_k, threshold in ((1, 2.0), (2, 1.0), (3, 1.0), (4, 0.0), (5, 0.0)):
        top_k = torch.tensor([top_k], dtype=torch.int32)
        _, found = Emulation().row_stats(logits, None, top_k, None, None, None)
        assert found.item() == threshold
    top_k = torch.tensor([4], dtype=torch.int32)
    probs = Emulation().logits_to_probs(logits, None, top_k, None, None, None)
    assert (probs[0] > 0).tolist() == [True] * 5 + [False]


def test_top_p_bound_is_exclusive():
    """The weights are 1, 1/2, 1/4 and 1/4 exactly: half of the mass lies above the second one."""
    logits = torch.tensor([[0.0, -1.0, -2.0, -2.0]])
    temperature = torch.tensor([1 / math.log(2)])
    for share, kept in ((0.25, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1e-30, 1)):
        parameters = temperature, None, torch.tensor([share]), None, None
        probs = Emulation().logits_to_probs(logits, *parameters)
        assert int((probs > 0).sum()) == kept, share


def test_shared_memory_is_asked_for_once_on_each_device():
    """A smaller row must not take away what a larger one is about to be launched with."""
    try:
        for device in (0, 1):
            library().emulated_device(device)
            for vocab in (40000, 30000, 50000):
                logits = torch.zeros(1, vocab, dtype=torch.bfloat16)
                found, _ = Emulation(1, 64).row_stats(logits, None, None, None, None, None)
                assert found.item() == pytest.approx(math.log(vocab))
    finally:
        library().emulated_device(0)


def test_the_largest_vocabulary_has_room_for_equal_weights():
    """One token more would make the sum of its weights 2**64."""
    logits = torch.zeros(1, MAX_GPU_VOCAB, dtype=torch.float16)
    found, _ = Emulation(1, 32, staged=False).row_stats(logits, None, None, None, None, None)
    assert found.item() == pytest.approx(math.log(MAX_GPU_VOCAB))


def test_distant_rows_are_addressed_in_64_bits():
    """The second row starts 2^32 elements after the first, in memory that is never touched."""
    vocab, stride = 40, 2**32
    no_reserve = 0x4000  # Linux; Python has no name for it before 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, 2 * (stride + vocab), flags=flags)
    logits = torch.frombuffer(memory, dtype=torch.float16).as_strided((2, vocab), (stride, 1))
    logits[1] = torch.arange(vocab)
    token_ids, _ = Emulation().sample(
        logits, torch.zeros(2), torch.zeros(2), None, None, None, None
    )
    assert token_ids.tolist() == [0, vocab - 1]


@pytest.mark.parametrize("num", [0, 1, 7, 300])
def test_uniform(num):
    generator = torch.Generator().manual_seed(num)
    seed, position = torch.randint(-(2**62), 2**62, (2, 5), generator=generator)
    expected = reference.uniform(seed, position, num, 3)
    assert Emulation(order=1).uniform(seed, position, num, 3).equal(expected)
