"""Bitmask, draft vocabulary and draft log-sum-exp of verify_chain where one answer is right."""

import math

import pytest
import torch

from fastspec_kernels import row_stats

from .cases import affordable, backends_of, invalid_rows
from .chain_cases import LAST, OFF, chain_case, check, random_case, run, with_logsumexp

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = backends_of("verify_chain")
METHODS = ("standard", "block")
FLAT = [0.0, 0.0, 0.0]
ALL = 0b111


def words(*rows):
    return torch.tensor([[row] for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_banned_proposal_is_rejected_whatever_the_draft_says(backend, method):
    """The grammar bans token 1; the residual is over the two others."""
    for draft, sample, extra in (([FLAT], LAST, 2), ([[OFF, 0.0, OFF]], 0.0, 0), (None, LAST, 2)):
        case = chain_case([FLAT, FLAT], draft, [1], [0.0, sample])
        case |= {"token_bitmask": words(0b101, ALL), "method": method}
        output, accepted_len, logprobs = run(case, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[extra, -1]], [0])
        assert logprobs[0, 0].item() == pytest.approx(-math.log(2), abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_bitmask_leaves_draft_rows_alone(backend, method):
    """Token 0 is 1/2 in the target and 1/3 in the draft; masked, the draft would be 1/2 as well."""
    case = chain_case([FLAT, FLAT], [FLAT], [0], [LAST, 0.0])
    case |= {"token_bitmask": words(0b011, ALL), "method": method}
    assert run(case, backend)[1].tolist() == [1]
    case["uniform_samples"] = torch.tensor([[0.6, 0.9]])
    case["draft_logits"] = torch.tensor([[[1.0, 0.0, 1.0]]]).log()
    case["target_logits"][0] = torch.tensor([0.2, 0.8, 0.5]).log()  # 0.2 of 1 against 0.5
    output, accepted_len, _ = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[1, -1]], [0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bitmask_comes_before_the_argmax_and_the_filters(backend):
    target = [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]
    for parameters in ({"temperature": 0.0}, {"top_p": 0.0}, {"min_p": 1.0}):
        case = chain_case(target, None, [1], [0.99, 0.99], **parameters)
        case["token_bitmask"] = words(0b110, 0b100)
        output, accepted_len, _ = run(case, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[1, 2]], [1]), parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_logprobs_are_over_the_allowed_tokens(backend):
    case = chain_case([[3.0, 2.0, 2.0]], None, [], [0.0], temperature=0.0)
    case["token_bitmask"] = words(0b110)
    assert run(case, backend)[2][0, 0].item() == pytest.approx(-math.log(2), abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_banned_cannot_spoil_a_row(backend, bad):
    case = chain_case([[0.0, bad, 1.0]], None, [], [0.0])
    case["token_bitmask"] = words(0b101)
    assert run(case, backend)[1].tolist() == [0]
    case["token_bitmask"] = words(0b111)
    assert run(case, backend)[1].tolist() == [-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_allowed_fails_the_sequence(backend):
    for row, mask in ((FLAT, 0), (FLAT, -8), ([OFF, 0.0, OFF], 0b101)):
        case = chain_case([row], None, [], [0.5])
        case["token_bitmask"] = words(mask)
        output, accepted_len, _ = run(case, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[-1]], [-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bit_of_a_word_counts(backend):
    """One allowed token at a time, the sign bit and the second word among them."""
    vocab = 40
    target = torch.zeros(vocab, vocab)
    bitmask = torch.zeros(vocab, 2, dtype=torch.int64)
    token = torch.arange(vocab)
    bitmask[token, token // 32] = 1 << (token % 32)
    case = {
        "target_logits": target,
        "cu_rows": torch.arange(vocab + 1, dtype=torch.int32),
        "draft_token_ids": torch.zeros(vocab, 0, dtype=torch.int32),
        "uniform_samples": torch.full((vocab, 1), 0.5),
        "token_bitmask": bitmask.int(),
    }
    assert run(case, backend)[0][:, 0].tolist() == token.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_token_that_the_drafter_does_not_have_has_draft_probability_zero(backend, method):
    """It is accepted wherever the target has it, and stays whole in the residual."""
    for columns in ([0, -1, 1], [0, 2, 1], [0, 2**31 - 1, 1], [0, -(2**31), 1]):
        case = chain_case([FLAT, FLAT], [[0.0, 0.0]], [1], [LAST, 0.0])
        case |= {"draft_token_map": torch.tensor(columns, dtype=torch.int32), "method": method}
        assert run(case, backend)[1].tolist() == [1]
        case["draft_token_ids"][:] = 2  # 1/3 against 1/2
        output, accepted_len, _ = run(case, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[1, -1]], [0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_map_leads_to_the_right_column(backend, method):
    """Reversed columns: the draft is sure of target token 2."""
    case = chain_case([FLAT, FLAT], [[0.0, OFF, OFF]], [2], [0.3, 0.0])
    columns = torch.tensor([2, 1, 0], dtype=torch.int32)
    case |= {"draft_token_map": columns, "method": method}
    assert run(case, backend)[1].tolist() == [1]
    case["uniform_samples"] = torch.tensor([[0.4, LAST]])
    output, accepted_len, _ = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[1, -1]], [0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_logsumexp_is_taken_at_its_word(backend):
    """Accepted or not by exp(x - logsumexp), even where the row says otherwise."""
    case = chain_case([FLAT, FLAT], [FLAT], [0], [0.5, 0.0])
    for logsumexp, accepted in ((math.log(3), 1), (0.0, 0), (5.0, 1)):
        case["draft_logsumexp"] = torch.tensor([[logsumexp]])
        assert run(case, backend)[1].tolist() == [accepted]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("uniform", "extra"), [(0.25, 1), (0.75, 2)])
def test_a_residual_beside_which_the_draft_vanishes(backend, uniform, extra):
    """As large as the caller says: both tokens that are left stay equally likely."""
    target = [OFF, 0.0, 0.0, *[OFF] * 61]
    case = chain_case([target, target], [[0.0] * 64], [0], [0.5, uniform])
    for option in ({"draft_logsumexp": torch.tensor([[100.0]])}, {"lenience": 1e38}):
        output, accepted_len, _ = run({**case, **option}, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[extra, -1]], [0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_logsumexp_only_the_draft_row_of_the_rejection_is_read(backend):
    """Other rows may hold anything at tokens that were not proposed."""
    generator = torch.Generator().manual_seed(1)
    for bad in invalid_rows(40):
        case = random_case(affordable(backend, 64), 4, 40, generator)
        case = with_logsumexp(case)
        expected = run(case, backend)
        rejection = expected[1].clamp(min=0)
        spoiled = case["draft_logits"].clone()
        tokens = case["draft_token_ids"].long()
        for b, i in ((b, i) for b in range(len(tokens)) for i in range(4)):
            if i != rejection[b]:
                kept = spoiled[b, i, tokens[b, i]].clone() if 0 <= tokens[b, i] < 40 else None
                spoiled[b, i] = bad
                if kept is not None:
                    spoiled[b, i, tokens[b, i]] = kept
        spoiled_case = {**case, "draft_logits": spoiled}
        check(spoiled_case, backend)
        for seen, wanted in zip(run(spoiled_case, backend), expected, strict=True):
            assert torch.equal(seen, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_numbers_that_logsumexp_makes_the_verifier_read(backend, bad):
    sure = [0.0, OFF, OFF]
    case = chain_case([sure] * 3, [sure, sure], [0, 0], [0.5, 0.5, 0.5])
    case["draft_logsumexp"] = torch.zeros(1, 2)
    assert run(case, backend)[1].tolist() == [2]
    for position in (0, 1):
        for name, index in (("draft_logsumexp", ()), ("draft_logits", (0,))):
            spoiled = case[name].clone()
            spoiled[(0, position, *index)] = bad
            assert run({**case, name: spoiled}, backend)[1].tolist() == [-1]
    case["draft_token_ids"] = torch.tensor([[1, 0]], dtype=torch.int32)
    case["draft_logsumexp"][0, 1] = bad  # after the rejection
    assert run(case, backend)[1].tolist() == [0]
    case["draft_logits"][0, 0, 2] = bad  # in the row of the rejection
    assert run(case, backend)[1].tolist() == [-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logsumexp_of_filtered_rows(backend):
    """Beyond the threshold the draft has probability 0, though its logit alone does not show it."""
    logits = [0.6, 0.4]
    row = torch.tensor([logits]).log()
    top_p = torch.tensor([0.5])
    logsumexp, _ = row_stats(row, top_p=top_p, backend="reference")
    target = [[OFF, OFF], [0.0, 0.0]]
    target[0] = [0.0, OFF]
    case = chain_case(target, [row[0].tolist()], [1], [0.0, 0.5], top_p=0.5)
    case["draft_logsumexp"] = logsumexp[None]
    output, accepted_len, _ = run(case, backend)
    assert (output[0, 0].item(), accepted_len.tolist()) == (0, [0])
    check(case, backend)
