"""sample against the oracle and against the exact distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec_kernels import sample
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
    uniform_samples,
)

pytestmark = pytest.mark.usefixtures("instruction_set")

FLOATS = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.just(-math.inf),
)


def run(logits, samples, params, backend):
    device = device_of(backend)
    on_device = {name: value.to(device) for name, value in params.items()}
    token_ids, logprobs = sample(
        logits.to(device), samples.to(device), **on_device, backend=backend
    )
    assert (token_ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    return token_ids.tolist(), logprobs.tolist()


def check_rows(logits, samples, params, backend):
    """Compare every row with the oracle; returns how many were too close to call."""
    token_ids, logprobs = run(logits, samples, params, backend)
    close = 0
    for index, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        row_params = row_params_of(params, index)
        expected = oracle.row(logits[index].double().numpy(), **row_params)
        if expected is None:
            assert token == -1, row_params
            assert math.isnan(logprob), row_params
            continue
        drawn = oracle.draw(expected.probs, samples[index].item())
        greedy = row_params.get("temperature") == 0
        if min(expected.margin, math.inf if greedy else drawn.margin) < margin_of(backend):
            close += 1
            assert 0 <= token < logits.shape[1], row_params
            continue
        assert token == drawn.token, row_params
        np.testing.assert_allclose(
            logprob, expected.logprobs[token], rtol=1e-5, atol=1e-5, err_msg=str(row_params)
        )
    return close


@pytest.mark.parametrize("backend", backends_of("sample"))
@pytest.mark.parametrize("vocab", SMALL_VOCABS)
def test_random_rows(backend, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close = 0
    for dtype in DTYPES:
        logits = random_logits(rows_for(vocab, backend), vocab, generator, dtype)
        samples = uniform_samples((len(logits),), generator)
        params = random_params(len(logits), vocab, generator)
        close += check_rows(logits, samples, params, backend)
    record_property("rows_too_close_to_call", close)
    assert close <= 96


@pytest.mark.parametrize("backend", backends_of("sample"))
@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(8, vocab, generator, DTYPES[vocab % 3])
    samples = uniform_samples((8,), generator)
    check_rows(logits, samples, random_params(8, vocab, generator), backend)


ANY_ROW = {
    "logits": st.lists(FLOATS, min_size=1, max_size=40),
    "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.5, math.inf]),
    "top_k": st.integers(-1, 8),
    "top_p": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1, 1.0]),
    "uniform": st.integers(0, 2**24 - 1).map(lambda bits: bits * 2.0**-24),
}


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_any_row(backend):
    num = affordable(backend, 150)

    @settings(max_examples=num, deadline=None, derandomize=True, database=None)
    @given(**ANY_ROW)
    def check(logits, temperature, top_k, top_p, min_p, uniform):
        params = {
            "temperature": torch.tensor([temperature]),
            "top_k": torch.tensor([top_k], dtype=torch.int32),
            "top_p": torch.tensor([top_p]),
            "min_p": torch.tensor([min_p]),
        }
        check_rows(torch.tensor([logits]), torch.tensor([uniform]), params, backend)

    check()


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_ends_of_the_unit_interval(backend):
    """u = 0 takes the first id that can be drawn, u just under 1 the last; never a masked one."""
    logits = torch.full((2, 40), -math.inf)
    logits[:, 5] = 0.0
    logits[:, 33] = -1.0
    token_ids, _ = run(logits, torch.tensor([0.0, 1 - 2.0**-24]), {}, backend)
    assert token_ids == [5, 33]


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_a_uniform_number_on_a_step_takes_the_next_id(backend):
    """At infinite temperature four tokens weigh a quarter each, exactly."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4, 1)
    samples = torch.tensor([0.0, 0.25, 0.5, 0.75])
    token_ids, _ = run(logits, samples, {"temperature": torch.full((4,), math.inf)}, backend)
    assert token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_greedy_rows_read_no_uniform_number(backend):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]]).repeat(3, 1)
    samples = torch.tensor([0.0, 1 - 2.0**-24, math.nan])
    token_ids, logprobs = run(logits, samples, {"temperature": torch.zeros(3)}, backend)
    assert token_ids == [1, 1, 1]
    assert logprobs == pytest.approx([float(logits[0].log_softmax(-1)[1])] * 3, abs=1e-6)


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_invalid_rows_harm_nobody_else(backend):
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(8, 100, generator)
    logits[[1, 3, 4]] = invalid_rows(100)
    params = {"temperature": torch.tensor([1.0, 1, 1, 1, 0, -1, math.nan, 1])}
    check_rows(logits, torch.rand(8, generator=generator), params, backend)


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_distribution(backend):
    """200000 draws of one row, with every filter on, follow the exact distribution."""
    generator = torch.Generator().manual_seed(4)
    num, vocab = 200_000, 16
    logits = torch.randn(vocab, generator=generator) * 2
    params = {"temperature": 1.3, "top_k": 12, "top_p": 0.97, "min_p": 0.01}
    exact = oracle.row(logits.numpy(), **params)
    dtypes = {"top_k": torch.int32}
    tensors = {
        name: torch.full((num,), value, dtype=dtypes.get(name, torch.float32))
        for name, value in params.items()
    }
    samples = torch.rand(num, generator=generator)
    token_ids, _ = run(logits.expand(num, vocab), samples, tensors, backend)
    counts = np.bincount(token_ids, minlength=vocab)
    assert counts[exact.probs == 0].sum() == 0
    assert chi_square(counts, exact.probs) > 1e-6


@pytest.mark.parametrize("backend", backends_of("sample"))
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000, 4097])
def test_random_bitmasks(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    for dtype in DTYPES:
        logits = random_logits(rows_for(vocab, backend), vocab, generator, dtype)
        params = random_params(len(logits), vocab, generator)
        params["token_bitmask"] = random_bitmask(logits, generator)
        samples = uniform_samples((len(logits),), generator)
        assert check_rows(logits, samples, params, backend) <= 4 + len(logits) // 4


@pytest.mark.parametrize("backend", backends_of("sample"))
@pytest.mark.parametrize("top_k", [2**31 - 1, 5000, -(2**31)])
def test_huge_top_k_gives_valid_ids(backend, top_k):
    logits = random_logits(64, 100, torch.Generator().manual_seed(5))
    params = {"top_k": torch.full((64,), top_k, dtype=torch.int32)}
    token_ids, _ = run(logits, torch.full((64,), 1 - 2.0**-24), params, backend)
    assert all(0 <= token < 100 for token in token_ids)


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_a_row_with_nan_never_gives_an_id_beyond_the_vocabulary(backend):
    for vocab in (5, 4097):
        logits = torch.full((2, vocab), math.nan)
        logits[1, :-1] = 0.0
        token_ids, _ = run(logits, torch.tensor([0.5, 1 - 2.0**-24]), {}, backend)
        assert token_ids == [-1, -1]


@pytest.mark.parametrize("backend", backends_of("sample"))
def test_greedy_rows_with_banned_tokens(backend):
    """-inf over a temperature of 0, or times a negative marker for greedy, would be the best."""
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])
    assert run(logits, torch.zeros(1), {"temperature": torch.zeros(1)}, backend)[0] == [2]
