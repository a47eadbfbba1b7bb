"""verify_chain against the oracle, and the cases where only one answer is right."""

import math

import numpy as np
import pytest
import torch

from fastspec_kernels import PAD_TOKEN_ID, verify_chain

from . import oracle
from .cases import (
    DTYPES,
    backends_of,
    device_of,
    invalid_rows,
    margin_of,
    random_logits,
    random_params,
    uniform_samples,
)

BACKENDS = backends_of("verify_chain")


def run(case, backend):
    """Call the op on a dictionary of CPU tensors; returns three CPU tensors."""
    device = device_of(backend)
    case = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.items()
    }
    output, accepted_len, logprobs = verify_chain(**case, backend=backend)
    assert (output.dtype, accepted_len.dtype, logprobs.dtype) == (
        torch.int32,
        torch.int32,
        torch.float32,
    )
    return output.cpu(), accepted_len.cpu(), logprobs.cpu()


def random_case(batch, num_draft, vocab, generator, dtype=torch.float32, draft="random"):
    """A ragged batch with every kind of row, parameter, proposal and padding."""
    rows = torch.randint(num_draft + 3, (batch,), generator=generator)
    cu_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
    num_rows = int(cu_rows[-1]) + 2  # two rows that belong to nobody
    target_logits = random_logits(num_rows, vocab, generator, dtype)
    target_logits[int(cu_rows[-1]) :] = math.nan
    tokens = torch.randint(vocab, (batch, num_draft), generator=generator).int()
    draft_logits = None
    if draft != "certain":
        draft_vocab = vocab if draft == "random" else max(1, vocab - 3)
        flat = random_logits(batch * num_draft, draft_vocab, generator, dtype)
        draft_logits = flat.view(batch, num_draft, draft_vocab)
    for b in range(batch):
        for i in range(num_draft):
            choice = int(torch.randint(8, (1,), generator=generator))
            row = min(int(cu_rows[b]) + i, num_rows - 3)
            if choice < 4 and int(cu_rows[b + 1]) > int(cu_rows[b]) + i:
                tokens[b, i] = int(target_logits[row].float().argmax())
                if choice < 2 and draft == "random":
                    draft_logits[b, i] = target_logits[row]
            elif choice == 4 and draft_logits is not None:
                tokens[b, i] = int(draft_logits[b, i].float().argmax())
        if b % 5 == 4 and num_draft:
            tokens[b, num_draft // 2] = -1
        if b % 7 == 6 and num_draft:
            tokens[b, num_draft - 1] = vocab + b
    return {
        "target_logits": target_logits,
        "cu_rows": cu_rows,
        "draft_token_ids": tokens,
        "uniform_samples": uniform_samples((batch, num_draft + 1), generator),
        "draft_logits": draft_logits,
        **random_params(batch, vocab, generator),
    }


def check(case, backend):
    """Compare every sequence with the oracle; returns how many were too close to call."""
    output, accepted_len, logprobs = run(case, backend)
    close = 0
    for b in range(len(output)):
        expected = expect(case, b)
        if expected.margin < margin_of(backend):
            close += 1
            continue
        length = len(expected.tokens)
        padding = [PAD_TOKEN_ID] * (output.shape[1] - length)
        assert output[b].tolist() == expected.tokens + padding, b
        assert int(accepted_len[b]) == expected.accepted_len, b
        np.testing.assert_allclose(
            logprobs[b, :length], expected.logprobs, rtol=1e-5, atol=1e-5, err_msg=str(b)
        )
        assert (logprobs[b, length:] == 0).all(), b
    return close


def expect(case, b):
    """What the oracle says of sequence b."""
    start, end = case["cu_rows"][b : b + 2].tolist()
    names = ("temperature", "top_k", "top_p", "min_p")
    params = {name: case[name][b].item() for name in names if case.get(name) is not None}
    draft_logits = case.get("draft_logits")
    return oracle.chain(
        case["target_logits"][start:end].double().numpy(),
        case["draft_token_ids"][b].tolist(),
        case["uniform_samples"][b].double().tolist(),
        None if draft_logits is None else draft_logits[b].double().numpy(),
        {"temperature": 1.0, **params},
        case.get("lenience", 1.0),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft", ["random", "smaller", "certain"])
@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 1000])
def test_random_batches(backend, draft, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close, batch = 0, 64 if vocab < 100 else 16
    for num_draft, dtype in zip((0, 1, 3, 8), (*DTYPES, torch.float32), strict=True):
        close += check(random_case(batch, num_draft, vocab, generator, dtype, draft), backend)
    record_property("sequences_too_close_to_call", close)
    assert close <= 2 * batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [4095, 4096, 4097, 32000, 50257, 128256])
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    num_draft = 4 if vocab < 10000 else 2
    for draft in ("random", "certain"):
        check(random_case(4, num_draft, vocab, generator, draft=draft), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lenience", [1.0, 1.5, 5.0])
def test_lenience(backend, lenience):
    batch, num_draft, vocab = 200, 3, 17
    generator = torch.Generator().manual_seed(5)
    draft_logits = torch.randn(batch, num_draft, vocab, generator=generator) * 1.5
    flat = draft_logits.softmax(-1).flatten(0, 1)
    case = {
        "target_logits": torch.randn(batch * 4, vocab, generator=generator) * 1.5,
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * 4,
        "draft_token_ids": torch.multinomial(flat, 1, generator=generator).view(batch, -1).int(),
        "uniform_samples": torch.rand(batch, num_draft + 1, generator=generator),
        "draft_logits": draft_logits,
        "lenience": lenience,
    }
    assert check(case, backend) < 5


def chain_case(target, draft, tokens, samples, **params):
    """One sequence given by rows of logits."""
    target_logits = torch.tensor(target, dtype=torch.float32)
    return {
        "target_logits": target_logits,
        "cu_rows": torch.tensor([0, len(target)], dtype=torch.int32),
        "draft_token_ids": torch.tensor([tokens], dtype=torch.int32).reshape(1, -1),
        "uniform_samples": torch.tensor([samples], dtype=torch.float32),
        "draft_logits": None if draft is None else torch.tensor([draft], dtype=torch.float32),
        **{name: torch.tensor([value]) for name, value in params.items()},
    }


OFF = -math.inf
LAST = 1 - 2.0**-24


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "tokens", "accepted_len"),
    [
        pytest.param(
            chain_case([[0, OFF, 1], [OFF, 0, OFF]], [[0, 5, 0]], [1], [0.0, 0.0]),
            [0, -1],
            0,
            id="u-0-never-accepts-a-token-of-probability-0",
        ),
        pytest.param(
            chain_case([[0, OFF, 1], [OFF, 0, OFF]], None, [1], [0.0, LAST]),
            [2, -1],
            0,
            id="certain-draft-of-probability-0",
        ),
        pytest.param(
            chain_case([[0.0, 1, 2], [OFF, 0, OFF]], [[0.0, 1, 2]], [0], [LAST, 0.5]),
            [0, 1],
            1,
            id="equal-models-always-accept",
        ),
        pytest.param(
            chain_case([[0.0, OFF], [OFF, 0]], [[0.0, OFF]], [1], [0.5, 0.5]),
            [0, -1],
            0,
            id="zero-residual-falls-back-to-the-target",
        ),
        pytest.param(
            chain_case([[0.0, 1, OFF, OFF], [0, 0, 0, 0]], [[OFF, OFF, 0, 1]], [3], [0.0, LAST]),
            [1, -1],
            0,
            id="disjoint-supports",
        ),
        pytest.param(
            chain_case([[0.0, OFF], [0, OFF]], [[OFF, 0]], [0], [LAST, 0.0]),
            [0, 0],
            1,
            id="draft-probability-0-accepts-what-the-target-has",
        ),
        pytest.param(
            chain_case([[0.0, 3.0, 1.0]], None, [], [0.9999], temperature=0.0),
            [1],
            0,
            id="greedy-without-proposals",
        ),
        pytest.param(
            chain_case([[2.0, 2.0], [1, 2]], [[math.nan, 0]], [0], [LAST, 0.0], temperature=0.0),
            [0, 1],
            1,
            id="greedy-reads-no-draft-row-and-no-uniform-number",
        ),
        pytest.param(
            chain_case([[2.0, 2.0], [1, 2]], None, [1], [0.0, 0.0], temperature=0.0),
            [0, -1],
            0,
            id="greedy-tie-is-the-lowest-id",
        ),
        pytest.param(
            chain_case([[9.0, 1, 2], [1, 2, 9]], None, [-1], [0.0, 0.0]),
            [0, -1],
            0,
            id="padding-ends-the-chain",
        ),
        pytest.param(
            chain_case([[9.0, OFF], [OFF, 9.0]], None, [2**31 - 1], [0.0, 0.0]),
            [0, -1],
            0,
            id="id-outside-the-vocabulary",
        ),
    ],
)
def test_one_answer(backend, case, tokens, accepted_len):
    output, accepted, logprobs = run(case, backend)
    assert (output[0].tolist(), int(accepted[0])) == (tokens, accepted_len)
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalid_rows_fail_their_sequence_alone(backend):
    """A bad target row in use fails the sequence; a row that is not in use may hold anything."""
    generator = torch.Generator().manual_seed(7)
    vocab = 40
    for bad in invalid_rows(vocab):
        target = torch.randn(12, vocab, generator=generator)
        draft = torch.randn(4, 2, vocab, generator=generator)
        target[4] = bad  # sequence 1, second proposal
        target[11] = bad  # sequence 3 has one proposal: its third row is not in use
        draft[2, 0] = bad
        draft[3, 1] = bad  # not in use either
        case = {
            "target_logits": target,
            "cu_rows": torch.tensor([0, 3, 6, 9, 12], dtype=torch.int32),
            "draft_token_ids": torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]], dtype=torch.int32),
            "uniform_samples": torch.rand(4, 3, generator=generator),
            "draft_logits": draft,
        }
        output, accepted_len, logprobs = run(case, backend)
        assert (accepted_len < 0).tolist() == [False, True, True, False]
        assert (output[[1, 2]] == PAD_TOKEN_ID).all()
        assert (logprobs[[1, 2]] == 0).all()
        check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_invalid_temperature(backend, temperature):
    case = chain_case([[0.0, 1], [0, 1]], None, [1], [0.5, 0.5], temperature=temperature)
    output, accepted_len, logprobs = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[-1, -1]], [-1])
    assert logprobs.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [0, 3])
def test_no_rows_at_all(backend, batch):
    case = {
        "target_logits": torch.zeros(0, 5),
        "cu_rows": torch.zeros(batch + 1, dtype=torch.int32),
        "draft_token_ids": torch.zeros(batch, 2, dtype=torch.int32),
        "uniform_samples": torch.zeros(batch, 3),
    }
    output, accepted_len, logprobs = run(case, backend)
    assert output.tolist() == [[-1, -1, -1]] * batch
    assert accepted_len.tolist() == [0] * batch
    assert logprobs.tolist() == [[0.0, 0.0, 0.0]] * batch
