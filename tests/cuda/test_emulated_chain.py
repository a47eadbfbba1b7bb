"""The CUDA kernels of verify_chain, run thread by thread on the CPU, against the oracle."""

import math

import numpy as np
import pytest
import torch

from ..kernels.cases import DTYPES, invalid_rows
from ..kernels.chain_cases import (
    LAST,
    OFF,
    chain_case,
    expect,
    random_case,
    with_bitmask,
    with_invalid_rows,
    with_logsumexp,
)
from . import emulated
from .emulated import Emulation
from .test_emulated_rows import MARGIN, PLANS, plan_id, same

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")

ARGUMENTS = (
    "target_logits",
    "cu_rows",
    "draft_token_ids",
    "uniform_samples",
    "draft_logits",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "lenience",
    "method",
    "draft_logsumexp",
    "draft_token_map",
    "token_bitmask",
)
DEFAULTS = {"lenience": 1.0, "method": "standard"}


def run(emulation, case):
    return emulation.verify_chain(*(case.get(name, DEFAULTS.get(name)) for name in ARGUMENTS))


def check(emulation, case):
    """Compare every sequence with the oracle; returns how many were too close to call."""
    output, accepted_len, logprobs = run(emulation, case)
    close = 0
    for b in range(len(output)):
        expected = expect(case, b)
        if expected.margin < MARGIN:
            close += 1
            continue
        padding = [-1] * (output.shape[1] - len(expected.tokens))
        assert output[b].tolist() == expected.tokens + padding, b
        assert int(accepted_len[b]) == expected.accepted_len, b
        exact = expected.logprobs + [0.0] * len(padding)
        np.testing.assert_allclose(logprobs[b], exact, rtol=1e-5, atol=1e-5, err_msg=str(b))
    return close


def without_filters(case):
    """The case with temperatures alone."""
    return {**case, "top_k": None, "top_p": None, "min_p": None}


def variants(case, generator):
    """The case under every option that its arguments allow."""
    yield case
    yield with_bitmask(case, generator)
    yield {**case, "lenience": 2.5}
    yield {**case, "method": "block"}
    if case.get("draft_logits") is not None:
        yield with_logsumexp(case)


@pytest.mark.parametrize("draft", ["random", "smaller", "mapped", "certain"])
@pytest.mark.parametrize("vocab", [1, 33, 260])
def test_random_batches(vocab, draft):
    generator = torch.Generator().manual_seed(vocab)
    close = cases = 0
    for num_draft, dtype in zip((1, 3, 5), DTYPES, strict=True):
        case = random_case(16, num_draft, vocab, generator, dtype, draft)
        if dtype != torch.float32:
            case = without_filters(case)
        for emulation, variant in zip(PLANS, variants(case, generator), strict=False):
            close += check(emulation, variant)
            cases += 16
    assert close <= cases / 10


@pytest.mark.parametrize("draft", ["random", "mapped", "certain"])
def test_every_plan_and_order_gives_the_same_bits(draft):
    generator = torch.Generator().manual_seed(11)
    case = random_case(6, 3, 4099, generator, torch.bfloat16, draft)
    for variant in variants(case, generator):
        for plain in (variant, without_filters(variant)):
            expected = run(PLANS[0], plain)
            check(PLANS[0], plain)
            plans = PLANS[1:] if plain is variant else PLANS[2:3]
            for emulation in plans:
                assert same(run(emulation, plain), expected), plan_id(emulation)


@pytest.mark.parametrize("draft", ["random", "mapped", "certain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_many_tiles(dtype, draft):
    """The bits depend neither on where a row lies in memory nor on the filters of batch mates."""
    generator = torch.Generator().manual_seed(14)
    vocab, batch = 9001, 6
    case = without_filters(random_case(batch, 2, vocab, generator, dtype, draft))
    case["temperature"] = torch.tensor([1.0, 0.0, 0.7, 10.0, 1.0, 0.0])
    case = with_bitmask(case, generator) if dtype == torch.float16 else case
    expected = run(PLANS[2], case)
    assert check(PLANS[2], case) <= 2
    target = case["target_logits"]
    moved = torch.full((len(target), vocab + 9), math.nan, dtype=dtype)[:, 3 : vocab + 3]
    assert same(run(PLANS[2], {**case, "target_logits": moved.copy_(target)}), expected)
    mates = {**case, "top_p": torch.tensor([1, 1, 1, 1, 0.5, 0.5])}
    assert same([found[:4] for found in run(PLANS[2], mates)], [x[:4] for x in expected])


def test_more_tiles_than_lanes():
    """All tokens are equally likely, up to float16 and the last of them."""
    vocab = 33 * 4096 + 5
    target = torch.zeros(2, vocab, dtype=torch.float16)
    target[:, -1] = 1.0
    for sample in (0.0, 0.3, 0.97, LAST):
        case = chain_case([[0.0], [0.0]], None, [5], [LAST, sample])
        case["target_logits"] = target
        output, accepted_len, _ = run(Emulation(2, 64), case)
        place = sample * (vocab - 2 + math.e)  # one is removed
        assert accepted_len.tolist() == [0]
        expected = min(int(place) + (place >= 5), vocab - 1)
        assert output[0].tolist() == [expected, -1]
    greedy = {**case, "temperature": torch.zeros(1), "target_logits": target.flip(1)}
    assert run(Emulation(2, 64), greedy)[0].tolist() == [[0, -1]]


def test_draft_rows_of_another_type():
    generator = torch.Generator().manual_seed(12)
    case = random_case(8, 3, 300, generator, torch.bfloat16)
    for dtype in DTYPES:
        check(PLANS[2], {**case, "draft_logits": case["draft_logits"].to(dtype)})


def test_more_proposals_than_lanes():
    """Equal models accept everything: the last of 70 proposals is judged in the third round."""
    generator = torch.Generator().manual_seed(13)
    target = torch.randn(71, 19, generator=generator)
    case = {
        "target_logits": target,
        "cu_rows": torch.tensor([0, 71], dtype=torch.int32),
        "draft_token_ids": torch.randint(19, (1, 70), generator=generator).int(),
        "uniform_samples": torch.full((1, 71), 0.9),
        "draft_logits": target[None, :70],
    }
    for method in ("standard", "block"):
        assert run(Emulation(), {**case, "method": method})[1].tolist() == [70]
        changed = target[None, :70].clone()
        changed[0, 67, int(case["draft_token_ids"][0, 67])] = 30.0
        changed_case = {**case, "method": method, "draft_logits": changed}
        assert run(Emulation(), changed_case)[1].tolist() == [67]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("target", "draft", "tokens", "samples", "output"),
    [
        ([[0, OFF, 1], [OFF, 0, OFF]], [[0, 5, 0]], [1], [0.0, 0.0], [0, -1]),
        ([[0, OFF, 1], [OFF, 0, OFF]], None, [1], [0.0, LAST], [2, -1]),
        ([[0.0, 1, 2], [OFF, 0, OFF]], [[0.0, 1, 2]], [0], [LAST, 0.5], [0, 1]),
        ([[0.0, OFF], [OFF, 0]], [[0.0, OFF]], [1], [0.5, 0.5], [0, -1]),
        ([[0.0, 1, OFF, OFF], [0] * 4], [[OFF, OFF, 0, 1]], [3], [0.0, LAST], [1, -1]),
        ([[0.0, OFF], [0, OFF]], [[OFF, 0]], [0], [LAST, 0.0], [0, 0]),
        ([[9.0, 1, 2], [1, 2, 9]], None, [-1], [0.0, 0.0], [0, -1]),
        ([[9.0, OFF], [OFF, 9.0]], None, [2**31 - 1], [0.0, 0.0], [0, -1]),
    ],
)
def test_one_answer(method, target, draft, tokens, samples, output):
    case = {**chain_case(target, draft, tokens, samples), "method": method}
    for emulation in PLANS[:3]:
        assert run(emulation, case)[0][0].tolist() == output


def test_greedy_and_certain_proposals_need_no_draft_row():
    case = chain_case([[2.0, 2.0], [1, 2]], [[math.nan, 0]], [0], [LAST, 0.0], temperature=0.0)
    assert run(Emulation(), case)[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_invalid_rows_fail_their_sequence_alone(emulation):
    generator = torch.Generator().manual_seed(7)
    for bad in invalid_rows(40):
        target = torch.randn(12, 40, generator=generator)
        draft = torch.randn(4, 2, 40, generator=generator)
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
        case["uniform_samples"][:, 0] = 0  # accepts the first proposals
        output, accepted_len, logprobs = run(emulation, case)
        assert (accepted_len < 0).tolist() == [False, True, True, False]
        assert (output[[1, 2]] == -1).all()
        assert (logprobs[[1, 2]] == 0).all()


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("draft", ["random", "certain"])
def test_an_invalid_row_ends_a_chain(method, draft):
    generator = torch.Generator().manual_seed(11)
    case = {**random_case(30, 3, 33, generator, draft=draft), "method": method}
    case = with_invalid_rows({"draft_logits": None, **case}, generator)
    assert check(Emulation(), case) < 10
    assert (run(Emulation(), case)[1] < 0).any()


def test_rows_outside_the_matrix_fail_their_sequence():
    case = chain_case([[0.0, 1.0], [0.0, 1.0]], None, [1], [0.0, 0.0])
    case["cu_rows"] = torch.tensor([1, 3], dtype=torch.int32)
    assert run(Emulation(), case)[1].tolist() == [-1]
