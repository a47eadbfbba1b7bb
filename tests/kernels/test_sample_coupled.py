"""sample_coupled against the oracle, the exact distribution, and what shared noise promises."""

import math

import numpy as np
import pytest
import torch

from fastspec_kernels import reference, sample_coupled
from fastspec_kernels.testing import chi_square

from . import oracle
from .cases import (
    DTYPES,
    LARGE_VOCABS,
    SMALL_VOCABS,
    affordable,
    backends_of,
    device_of,
    invalid_rows,
    margin_of,
    random_bitmask,
    random_logits,
    random_params,
    row_params_of,
    rows_for,
)
from .test_uniform import philox

pytestmark = pytest.mark.usefixtures("instruction_set")
backends = pytest.mark.parametrize("backend", backends_of("sample_coupled"))


def run(logits, seed, position, params, backend):
    device = device_of(backend)
    on_device = {name: value.to(device) for name, value in params.items()}
    tensors = [tensor.to(device) for tensor in (logits, seed, position)]
    token_ids, logprobs = sample_coupled(*tensors, **on_device, backend=backend)
    assert (token_ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    return token_ids.tolist(), logprobs.tolist()


def check_rows(logits, params, backend):
    """Compare every row with the oracle; returns how many were too close to call."""
    keys = keys_of(len(logits))
    return check_outputs(run(logits, *keys, params, backend), logits, keys, params, backend)


def keys_of(num_rows):
    """Seeds and positions of rows, beyond 32 bits."""
    row = torch.arange(num_rows)
    return row * 0x123456789ABCDEF, row * 2**31


def check_outputs(outputs, logits, keys, params, backend):
    """Compare what was drawn with the oracle; returns how many rows were too close to call."""
    (token_ids, logprobs), (seed, position) = outputs, keys
    noise = reference.rng.gumbel(seed, position, logits.shape[1]).numpy()
    close = 0
    for index, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        row_params = row_params_of(params, index)
        expected = oracle.row(logits[index].double().numpy(), **row_params)
        if expected is None:
            assert token == -1, row_params
            assert math.isnan(logprob), row_params
            continue
        best, margin = int(expected.probs.argmax()), math.inf
        if row_params.get("temperature") != 0:
            best, margin = oracle.race(expected, noise[index])
        if min(expected.margin, margin) < margin_of(backend):
            close += 1
            assert 0 <= token < logits.shape[1], row_params
            continue
        assert token == best, row_params
        np.testing.assert_allclose(
            logprob, expected.logprobs[best], rtol=1e-5, atol=1e-5, err_msg=str(row_params)
        )
    return close


@backends
@pytest.mark.parametrize("vocab", SMALL_VOCABS)
def test_random_rows(backend, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close = 0
    for dtype in DTYPES:
        logits = random_logits(rows_for(vocab, backend), vocab, generator, dtype)
        params = random_params(len(logits), vocab, generator)
        close += check_rows(logits, params, backend)
    record_property("rows_too_close_to_call", close)
    assert close <= 96


@backends
@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(8, vocab, generator, DTYPES[vocab % 3])
    check_rows(logits, random_params(8, vocab, generator), backend)


@backends
def test_unfiltered_rows_of_every_steepness(backend):
    """Few or many tokens can win; temperatures move nearly all of them in and out of reach."""
    generator = torch.Generator().manual_seed(8)
    num = affordable(backend, 80)
    for vocab in (300, 5000):
        scale = torch.logspace(-3, 2, num)[:, None]
        logits = torch.randn(num, vocab, generator=generator) * scale
        assert check_rows(logits, {}, backend) <= 1 + num // 20


@backends
@pytest.mark.parametrize("vocab", [33, 4097])
def test_random_bitmasks(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(rows_for(vocab, backend), vocab, generator)
    params = random_params(len(logits), vocab, generator)
    params["token_bitmask"] = random_bitmask(logits, generator)
    assert check_rows(logits, params, backend) <= 4 + len(logits) // 4


@backends
def test_invalid_rows_harm_nobody_else(backend):
    logits = random_logits(8, 100, torch.Generator().manual_seed(3))
    logits[[1, 3, 4]] = invalid_rows(100)
    params = {"temperature": torch.tensor([1.0, 1, 1, 1, 0, -1, math.nan, 1])}
    check_rows(logits, params, backend)


@backends
def test_greedy_rows_read_no_noise(backend):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]]).repeat(3, 1)
    seed = torch.tensor([0, 1, -1])
    token_ids, logprobs = run(logits, seed, seed, {"temperature": torch.zeros(3)}, backend)
    assert token_ids == [1, 1, 1]
    assert logprobs == pytest.approx([float(logits[0].log_softmax(-1)[1])] * 3, abs=1e-6)


@backends
def test_equal_logits_show_the_noise(backend):
    """Stated once more, in Python's own integers: the least exponential number wins."""
    vocab = 300
    seeds, positions = [5, -1, 2**63 - 1], [0, 2**40 + 1, -(2**63)]
    token_ids, _ = run(
        torch.zeros(3, vocab), torch.tensor(seeds), torch.tensor(positions), {}, backend
    )
    for token, seed, position in zip(token_ids, seeds, positions, strict=True):
        exponential = exponential_numbers(seed, position, vocab)
        assert token == exponential.index(min(exponential))


def exponential_numbers(seed: int, position: int, vocab: int) -> list[float]:
    """Of a row, whose tokens draw them in groups of sixteen."""

    def word(index: int, stream: int) -> int:
        counter = position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, index // 4, stream
        return philox(seed % 2**64, counter)[index % 4]

    numbers = []
    for x in range(vocab):
        shared = word(16 * (x // 256) + x % 16, 0x67756D62)
        least = -math.log((shared // 16 + 0.5) / 2**28) / 16
        more = -math.log((word(x, 0x67756D63) + 0.5) / 2**32)
        numbers.append(least if shared % 16 == x // 16 % 16 else least + more)
    return numbers


@backends
@pytest.mark.parametrize("filtered", [False, True])
def test_distribution(backend, filtered):
    """Draws of one row at consecutive positions follow the exact distribution."""
    generator = torch.Generator().manual_seed(4)
    num, vocab = 20_000, 16
    logits = torch.randn(vocab, generator=generator) * 2
    filters = {"top_k": 12, "top_p": 0.97, "min_p": 0.01} if filtered else {}
    params = {"temperature": 1.3, **filters}
    exact = oracle.row(logits.numpy(), **params)
    tensors = {
        name: torch.full((num,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in params.items()
    }
    seed, position = torch.full((num,), 77), torch.arange(num)
    token_ids, _ = run(logits.expand(num, vocab), seed, position, tensors, backend)
    counts = np.bincount(token_ids, minlength=vocab)
    assert counts[exact.probs == 0].sum() == 0
    assert chi_square(counts, exact.probs) > 1e-6
    pairs = np.array(token_ids).reshape(-1, 2)
    joint = np.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab**2)
    assert chi_square(joint, np.outer(exact.probs, exact.probs).flatten()) > 1e-6


@backends
def test_two_models_agree_as_often_as_the_coupling_promises(backend):
    """At least (1 - d) / (1 + d) of the draws, less six standard errors."""
    generator = torch.Generator().manual_seed(6)
    num = affordable(backend, 4_000)
    rows = torch.randn(2, 1, 50, generator=generator)
    target = rows[0]
    draft = target + 0.4 * rows[1]
    seed, position = torch.full((num,), 3), torch.arange(num)
    tokens = [run(x.expand(num, 50), seed, position, {}, backend)[0] for x in (target, draft)]
    distance = float((target.softmax(-1) - draft.softmax(-1)).abs().sum()) / 2
    promised = (1 - distance) / (1 + distance)
    agreed = np.mean(np.equal(*tokens))
    assert promised > 0.5
    assert agreed > promised - 6 * math.sqrt(promised * (1 - promised) / num)


@pytest.mark.parametrize("name", ["seed", "position"])
def test_wrong_seeds_and_positions(name):
    good = {"seed": torch.arange(3), "position": torch.arange(3)}
    for bad in (torch.arange(3).int(), torch.arange(4), torch.arange(3)[:, None], 7):
        with pytest.raises(ValueError, match=f"^{name}: "):
            sample_coupled(torch.zeros(3, 5), **{**good, name: bad})
