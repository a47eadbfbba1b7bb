"""verify_chain against the oracle, and the cases where only one answer is right."""

import math
from functools import partial
from itertools import permutations

import pytest
import torch

from fastspec_kernels import PAD_TOKEN_ID, verify_chain
from fastspec_kernels.testing import CHAIN_EDGES, assert_chain_edge

from .cases import affordable, backends_of, device_of, invalid_rows, is_slow, sizes_and_dtypes
from .chain_cases import (
    chain_case,
    check,
    random_case,
    run,
    with_bitmask,
    with_invalid_rows,
    with_logsumexp,
)

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = backends_of("verify_chain")
METHODS = ("standard", "block")
KINDS = {
    "random": ("random", None),
    "smaller": ("smaller", None),
    "mapped": ("mapped", None),
    "certain": ("certain", None),
    "random-bitmask": ("random", with_bitmask),
    "mapped-bitmask": ("mapped", with_bitmask),
    "certain-bitmask": ("certain", with_bitmask),
}
WITH_LOGSUMEXP = ("random", "smaller", "mapped", "mapped-bitmask")


def batch_of(kind, shape, generator, method="standard", dtype=torch.float32):
    """A random batch of one of KINDS; shape is (batch, num_draft, vocab)."""
    draft, mask = KINDS[kind]
    case = random_case(*shape, generator, dtype, draft)
    return {**(mask(case, generator) if mask else case), "method": method}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
def test_random_batches(backend, method, kind, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close, batch = 0, affordable(backend, 32 if vocab < 100 else 12)
    for num_draft, dtype in sizes_and_dtypes(backend, (7, 3, 1, 0), vocab):
        case = batch_of(kind, (batch, num_draft, vocab), generator, method, dtype)
        close += check(case, backend)
    record_property("sequences_too_close_to_call", close)
    assert close <= 1 + batch // 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "smaller", "mapped"])
def test_rows_of_unlike_types(backend, kind):
    generator = torch.Generator().manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for target, draft in permutations(dtypes, 2):
        case = batch_of(kind, (affordable(backend, 12), 3, 40), generator)
        for name, dtype in (("target_logits", target), ("draft_logits", draft)):
            case[name] = case[name].to(dtype)
        check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WITH_LOGSUMEXP)
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
def test_random_batches_with_logsumexp(backend, kind, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close, batch = 0, affordable(backend, 32 if vocab < 100 else 12)
    for num_draft, dtype in sizes_and_dtypes(backend, (7, 3, 1, 0), vocab):
        case = batch_of(kind, (batch, num_draft, vocab), generator, dtype=dtype)
        close += check(with_logsumexp(case), backend)
    record_property("sequences_too_close_to_call", close)
    assert close <= 2 + batch  # differences of large float32 numbers are called close


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [4096, 4097, 50257, 128256])
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    shape = (1 if is_slow(backend) else 4, 2, vocab)
    for kind in ("random", "certain", "mapped-bitmask"):
        method = METHODS[kind == "mapped-bitmask"]
        check(batch_of(kind, shape, generator, method), backend)
    check(with_logsumexp(batch_of("random", shape, generator)), backend)


def plain_case(batch, num_draft, vocab, generator):
    """Moderate rows, proposals drawn from the draft, no parameters: everything can happen."""
    target = torch.randn(batch, num_draft + 1, vocab, generator=generator) * 1.5
    noise = torch.randn(batch, num_draft, vocab, generator=generator)
    draft_logits = target[:, :num_draft] + noise
    flat = draft_logits.softmax(-1).flatten(0, 1)
    tokens = torch.multinomial(flat, 1, generator=generator).view(batch, -1)
    return {
        "target_logits": target.flatten(0, 1),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * (num_draft + 1),
        "draft_token_ids": tokens.int(),
        "uniform_samples": torch.rand(batch, num_draft + 1, generator=generator),
        "draft_logits": draft_logits,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_draft", [1, 2, 5, 6, 9])
def test_plain_batches(backend, method, num_draft):
    generator = torch.Generator().manual_seed(num_draft)
    case = plain_case(affordable(backend, 120), num_draft, 17, generator)
    assert check({**case, "method": method}, backend) < 5
    if method == "standard":
        assert check(with_logsumexp(case), backend) < 5
    case["draft_logits"] = None
    assert check({**case, "method": method}, backend) < 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lenience", [1.5, 5.0])
def test_lenience(backend, lenience):
    generator = torch.Generator().manual_seed(5)
    case = {**plain_case(affordable(backend, 120), 3, 17, generator), "lenience": lenience}
    assert check(case, backend) < 5
    assert check(with_logsumexp(case), backend) < 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edge", CHAIN_EDGES, ids=lambda edge: edge.name)
def test_edges(backend, method, edge):
    verify = partial(verify_chain, method=method, backend=backend)
    assert_chain_edge(verify, edge, device_of(backend))
    output, _, logprobs = verify(**edge.arguments(device_of(backend)))
    emitted = output >= 0
    assert torch.isfinite(logprobs[emitted]).all()
    assert (logprobs[~emitted] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_accepts_a_prefix_that_the_standard_rule_rejects(backend):
    """The first proposal alone is too unlikely, but the second makes up for it."""
    half, sure = [0.0, 0.0], [0.0, -math.inf]
    case = chain_case([half, sure, half], [sure, half], [0, 0], [0.6, 0.9, 0.0])
    for method, accepted in (("standard", 0), ("block", 2)):
        _, accepted_len, _ = run({**case, "method": method}, backend)
        assert accepted_len.tolist() == [accepted]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("uniform", "token"), [(0.2, 512), (0.3, 512), (0.6, 5000), (0.9, 5000)])
def test_a_rejected_token_leaves_its_part_of_a_row_to_others(backend, method, uniform, token):
    """Kernels add up a row in parts, and take the rejected token out of the sum of its part."""
    row = [-math.inf] * 9000
    row[0], row[512], row[5000] = math.log(0.8), math.log(0.1), math.log(0.1)
    case = chain_case([row, row], None, [0], [0.9, uniform])
    output, accepted_len, logprobs = run({**case, "method": method}, backend)
    assert accepted_len.tolist() == [0]
    assert output.tolist() == [[token, PAD_TOKEN_ID]]
    torch.testing.assert_close(logprobs[0, 0].item(), math.log(0.1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [4096, 9000])
def test_what_a_rejected_token_leaves_is_small_but_possible(backend, method, vocab):
    """Eight of the others count where sums are rounded, and one alone does not."""
    row = torch.full((vocab,), -math.inf)
    row[5] = 0
    row[100:] = -22.9
    case = chain_case([row.tolist()] * 2, None, [5], [1 - 2**-24, 0.5])
    case["token_bitmask"] = torch.full((2, -(-vocab // 32)), -1, dtype=torch.int32)
    case["token_bitmask"][:, 128:129] = -2  # without token 4096
    output, accepted_len, logprobs = run({**case, "method": method}, backend)
    assert accepted_len.tolist() == [0]
    assert output[0, 0].item() in {5, *range(100, vocab)} - {4096}
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_invalid_rows_fail_their_sequence_alone(backend, method):
    """A bad row that the text gets to fails the sequence; any other may hold anything."""
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
            "method": method,
        }
        case["uniform_samples"][:, 0] = 0  # accepts the first proposals
        output, accepted_len, logprobs = run(case, backend)
        assert (accepted_len < 0).tolist() == [False, True, True, False]
        assert (output[[1, 2]] == PAD_TOKEN_ID).all()
        assert (logprobs[[1, 2]] == 0).all()
        check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "certain"])
@pytest.mark.parametrize("method", METHODS)
def test_an_invalid_row_ends_a_chain(backend, method, kind):
    """Sequences whose text stops before it are as they would be; the others fail."""
    generator = torch.Generator().manual_seed(11)
    batch = 8 if is_slow(backend) else 60
    case = {**plain_case(batch, 3, 17, generator), "method": method}
    case["temperature"] = torch.arange(batch) % 4 / 2
    if kind == "certain":
        case["draft_logits"] = None
    case = with_invalid_rows(case, generator)
    assert check(case, backend) < 5
    accepted_len = run(case, backend)[1]
    assert (accepted_len < 0).any()
    assert (accepted_len[::2] >= 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_invalid_temperature(backend, temperature):
    case = chain_case([[0.0, 1], [0, 1]], None, [1], [0.5, 0.5], temperature=temperature)
    output, accepted_len, logprobs = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[-1, -1]], [-1])
    assert logprobs.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [0, 3])
def test_no_rows_at_all(backend, method, batch):
    case = {
        "target_logits": torch.zeros(0, 5),
        "cu_rows": torch.zeros(batch + 1, dtype=torch.int32),
        "draft_token_ids": torch.zeros(batch, 2, dtype=torch.int32),
        "uniform_samples": torch.zeros(batch, 3),
        "method": method,
    }
    output, accepted_len, logprobs = run(case, backend)
    assert output.tolist() == [[-1, -1, -1]] * batch
    assert accepted_len.tolist() == [0] * batch
    assert logprobs.tolist() == [[0.0, 0.0, 0.0]] * batch
