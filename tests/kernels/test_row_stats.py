"""row_stats and logits_to_probs against the oracle."""

import math

import numpy as np
import pytest
import torch

from fastspec_kernels import logits_to_probs, row_stats

from . import oracle
from .cases import (
    DTYPES,
    LARGE_VOCABS,
    SMALL_VOCABS,
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

pytestmark = pytest.mark.usefixtures("instruction_set")


def check_rows(logits, params, backend):
    """Compare every row of both ops with the oracle; returns how many were too close to call."""
    device = device_of(backend)
    on_device = {name: value.to(device) for name, value in params.items()}
    logsumexp, threshold = row_stats(logits.to(device), **on_device, backend=backend)
    probs = logits_to_probs(logits.to(device), **on_device, backend=backend).cpu().numpy()
    close = 0
    for index in range(len(logits)):
        row_params = row_params_of(params, index)
        x = logits[index].double().numpy()
        expected = oracle.row(x, **row_params)
        if expected is None:
            assert math.isnan(logsumexp[index]), row_params
            assert math.isnan(threshold[index]), row_params
            assert np.isnan(probs[index]).all(), row_params
            continue
        if expected.margin < margin_of(backend):
            close += 1
            continue
        if "bitmask" in row_params:
            x = np.where(oracle.allowed_tokens(row_params["bitmask"], len(x)), x, -np.inf)
        finite = np.isfinite(x)
        kept = x >= threshold[index].item()
        np.testing.assert_array_equal(kept[finite], expected.kept[finite], err_msg=str(row_params))
        np.testing.assert_allclose(
            logsumexp[index].item(),
            np.float32(expected.logsumexp),
            rtol=1e-6,
            atol=1e-5,
            err_msg=str(row_params),
        )
        np.testing.assert_allclose(
            probs[index], expected.probs, rtol=2e-5, atol=1e-7, err_msg=str(row_params)
        )
        assert (probs[index][expected.probs == 0] == 0).all(), row_params
    return close


@pytest.mark.parametrize("backend", backends_of("row_stats"))
@pytest.mark.parametrize("vocab", SMALL_VOCABS)
def test_random_rows(backend, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close = 0
    for dtype in DTYPES:
        logits = random_logits(rows_for(vocab, backend), vocab, generator, dtype)
        close += check_rows(logits, random_params(len(logits), vocab, generator), backend)
    record_property("rows_too_close_to_call", close)
    assert close <= 10


@pytest.mark.parametrize("backend", backends_of("row_stats"))
@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(8, vocab, generator, DTYPES[vocab % 3])
    check_rows(logits, random_params(8, vocab, generator), backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_each_parameter_alone(backend, name):
    generator = torch.Generator().manual_seed(1)
    num = rows_for(50, backend)
    logits = random_logits(num, 50, generator)
    check_rows(logits, {name: random_params(num, 50, generator)[name]}, backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_no_parameters(backend):
    logits = random_logits(16, 100, torch.Generator().manual_seed(2)).to(device_of(backend))
    logsumexp, threshold = row_stats(logits, backend=backend)
    assert (threshold == -math.inf).all()
    torch.testing.assert_close(logsumexp, logits.double().logsumexp(-1).float())


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_invalid_rows_harm_nobody_else(backend):
    generator = torch.Generator().manual_seed(3)
    for vocab in (2, 33, 5000):
        logits = random_logits(8, vocab, generator)
        logits[[1, 3, 4]] = invalid_rows(vocab)
        params = random_params(8, vocab, generator)
        params["temperature"][6] = -1.0
        params["temperature"][7] = math.nan
        check_rows(logits, params, backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
@pytest.mark.parametrize("vocab", [8, 4097])
def test_ties_stay_together(backend, vocab):
    logits = torch.zeros(3, vocab)
    logits[:, vocab // 2 :] = -1.0
    params = {
        "top_k": torch.tensor([1, vocab // 2 + 1, 0], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 1e-6]),
    }
    device = device_of(backend)
    on_device = {name: value.to(device) for name, value in params.items()}
    _, threshold = row_stats(logits.to(device), **on_device, backend=backend)
    assert threshold.tolist() == [0.0, -1.0, 0.0]
    check_rows(logits, params, backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_top_p_is_strict(backend):
    """At infinite temperature four tokens weigh a quarter each, exactly."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4, 1).to(device_of(backend))
    temperature = torch.full((4,), math.inf, device=logits.device)
    top_p = torch.tensor([0.25, 0.5, 0.51, 0.75], device=logits.device)
    _, threshold = row_stats(logits, temperature=temperature, top_p=top_p, backend=backend)
    assert threshold.tolist() == [3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_greedy_row(backend):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]], device=device_of(backend))
    temperature = torch.zeros(1, device=logits.device)
    logsumexp, threshold = row_stats(logits, temperature=temperature, backend=backend)
    assert threshold.tolist() == [3.0]
    torch.testing.assert_close(logsumexp, logits.logsumexp(-1))
    probs = logits_to_probs(logits, temperature=temperature, backend=backend)
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_no_rows(backend):
    logits = torch.zeros(0, 5, device=device_of(backend))
    assert [out.shape for out in row_stats(logits, backend=backend)] == [(0,), (0,)]
    assert logits_to_probs(logits, backend=backend).shape == (0, 5)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_temperatures_below_the_spacing_of_floats(backend):
    best = torch.tensor(1000.0)
    rows = best.view(torch.int32) - torch.arange(50, dtype=torch.int32)  # neighbouring floats
    for temperature in (2e-5, 3e-6, 1.2e-6, 1.1e-6, 1e-7, 1e-30):
        params = {"temperature": torch.tensor([temperature])}
        assert check_rows(rows.flip(0).view(torch.float32)[None], params, backend) == 0


@pytest.mark.parametrize("backend", backends_of("row_stats"))
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000, 4097])
def test_random_bitmasks(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    for dtype in DTYPES:
        logits = random_logits(rows_for(vocab, backend), vocab, generator, dtype)
        params = random_params(len(logits), vocab, generator)
        params["token_bitmask"] = random_bitmask(logits, generator)
        assert check_rows(logits, params, backend) <= 4


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_top_p_between_neighbouring_floats(backend):
    """A search for the threshold has nothing between two adjacent floats, and must end."""
    low = torch.tensor(1.0)
    pair = torch.stack([low, torch.nextafter(low, torch.tensor(2.0))]).repeat(1, 8)
    for top_p in (0.3, 0.6, 0.999):
        check_rows(pair, {"top_p": torch.tensor([top_p])}, backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_subnormal_logits(backend):
    """Flushed to zero they would all be equal; a search by halves would not end."""
    tiny = torch.arange(40, dtype=torch.int32).view(torch.float32)[None]
    for params in (
        {"top_k": torch.tensor([7], dtype=torch.int32)},
        {"top_p": torch.tensor([0.51])},
    ):
        check_rows(tiny, params, backend)


@pytest.mark.parametrize("backend", backends_of("row_stats"))
def test_subnormal_logits_in_bfloat16(backend):
    logits = torch.tensor([[1e-40, 2e-40, 3e-40]]).to(torch.bfloat16).to(device_of(backend))
    top_k = torch.ones(1, dtype=torch.int32, device=logits.device)
    probs = logits_to_probs(logits, top_k=top_k, backend=backend)
    assert probs.tolist() == [[0.0, 0.0, 1.0]]
