"""The CUDA kernels of the tree ops, run thread by thread on the CPU, against the oracle."""

import math

import numpy as np
import pytest
import torch

from fastspec_kernels import reference

from ..kernels.cases import DTYPES, invalid_rows, random_bitmask
from ..kernels.chain_cases import LAST, OFF
from ..kernels.tree_cases import RULES, expect, plain_case, random_case, random_parents
from . import emulated
from .emulated import PLANS, Emulation, plan_id, same

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")

MARGIN = 1e-5
ARGUMENTS = (
    "target_logits",
    "cu_rows",
    "tree_token_ids",
    "parents",
    "uniform_samples",
    "sibling_rule",
    "draft_logits",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "draft_token_map",
    "token_bitmask",
)


def run(emulation, case):
    return emulation.verify_tree(*map(case.get, ARGUMENTS))


def check(emulation, case):
    """Compare every sequence with the oracle; returns how many were too close to call."""
    path, output, accepted_len, logprobs = run(emulation, case)
    num_nodes, close = path.shape[1], 0
    for b in range(len(path)):
        expected = expect(case, b)
        if expected.margin < MARGIN:
            close += 1
            continue
        padding = [-1] * num_nodes
        assert path[b].tolist() == (expected.path + padding)[:num_nodes], b
        assert output[b].tolist() == (expected.tokens + padding)[:num_nodes], b
        assert int(accepted_len[b]) == expected.accepted_len, b
        exact = (expected.logprobs + [0.0] * num_nodes)[:num_nodes]
        np.testing.assert_allclose(logprobs[b], exact, rtol=1e-5, atol=1e-5, err_msg=str(b))
    return close


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [1, 5, 33, 260])
def test_random_trees(vocab, rule):
    generator = torch.Generator().manual_seed(vocab)
    kinds = ("random", "smaller", "mapped")
    close = cases = 0
    for kind, dtype, emulation in zip(kinds, DTYPES, PLANS, strict=False):
        case = random_case(16, 7, vocab, generator, rule, dtype, kind)
        close += check(emulation, case)
        case["token_bitmask"] = random_bitmask(case["target_logits"], generator)
        close += check(PLANS[3], case)
        cases += 32
    assert close <= cases / 10


@pytest.mark.parametrize("rule", RULES)
def test_every_plan_and_order_gives_the_same_bits(rule):
    """Also where the rows lie elsewhere in memory, and whatever the filters of batch mates are."""
    generator = torch.Generator().manual_seed(21)
    case = random_case(6, 9, 4099, generator, rule, torch.bfloat16, "mapped")
    expected = run(PLANS[0], case)
    check(PLANS[0], case)
    for emulation in PLANS[1:]:
        assert same(run(emulation, case), expected), plan_id(emulation)
    target = case["target_logits"]
    moved = torch.full((len(target), 4099 + 9), math.nan, dtype=target.dtype)[:, 3 : 4099 + 3]
    assert same(run(PLANS[2], {**case, "target_logits": moved.copy_(target)}), expected)
    mates = {**case, "top_p": case["top_p"].clone()}
    mates["top_p"][4:] = 0.3
    assert same([x[:4] for x in run(PLANS[2], mates)], [x[:4] for x in expected])


@pytest.mark.parametrize("rule", RULES[1:])
def test_draft_rows_of_another_type(rule):
    generator = torch.Generator().manual_seed(24)
    case = random_case(8, 5, 300, generator, rule, torch.bfloat16)
    for dtype in DTYPES:
        assert check(PLANS[2], {**case, "draft_logits": case["draft_logits"].to(dtype)}) < 3


@pytest.mark.parametrize(
    ("target", "draft", "token", "samples", "output"),
    [
        ([[0, OFF, 1], [OFF, 0, OFF]], [[0, 5, 0]], 1, [0.0, 0.0], [0, -1]),
        ([[0, OFF, 1], [OFF, 0, OFF]], None, 1, [0.0, LAST], [2, -1]),
        ([[0.0, 1, 2], [OFF, 0, OFF]], [[0.0, 1, 2]], 0, [LAST, 0.5], [0, 1]),
        ([[0.0, OFF], [OFF, 0]], [[0.0, OFF]], 1, [0.5, 0.5], [0, -1]),
        ([[0.0, 1, OFF, OFF], [0] * 4], [[OFF, OFF, 0, 1]], 3, [0.0, LAST], [1, -1]),
        ([[0.0, OFF], [0, OFF]], [[OFF, 0]], 0, [LAST, 0.0], [0, 0]),
        ([[9.0, 1, 2], [1, 2, 9]], None, -1, [0.0, 0.0], [0, -1]),
        ([[9.0, OFF], [OFF, 9.0]], None, 2**31 - 1, [0.0, 0.0], [0, -1]),
    ],
)
def test_one_child(target, draft, token, samples, output):
    """One answer is right; samples: of the judgement, of the extra token."""
    case = {
        "target_logits": torch.tensor(target, dtype=torch.float32),
        "cu_rows": torch.tensor([0, 2], dtype=torch.int32),
        "tree_token_ids": torch.tensor([[0, token]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0]], dtype=torch.int32),
        "uniform_samples": torch.tensor([[samples[0], *samples]]),
        "sibling_rule": "target_only" if draft is None else "with_replacement",
        "draft_logits": draft and torch.tensor([draft * 2], dtype=torch.float32),
    }
    for emulation in PLANS[:3]:
        assert run(emulation, case)[1][0].tolist() == output


@pytest.mark.parametrize(("temperature", "logprob"), [(math.inf, -math.log(2)), (1e38, -6.00248)])
def test_logits_whose_distance_is_no_float(temperature, logprob):
    case = {
        "target_logits": torch.tensor([[3e38, -3e38]]),
        "cu_rows": torch.tensor([0, 1], dtype=torch.int32),
        "tree_token_ids": torch.zeros((1, 1), dtype=torch.int32),
        "parents": torch.tensor([[-1]], dtype=torch.int32),
        "uniform_samples": torch.tensor([[0.0, 0.999]]),
        "sibling_rule": "target_only",
        "temperature": torch.tensor([temperature]),
    }
    for emulation in PLANS[:3]:
        _, output, _, logprobs = run(emulation, case)
        assert output[0].tolist() == [1]
        assert float(logprobs[0, 0]) == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "parents", [[-1, 0, 0, 0, 1, 1, 2], [-1, 0, 1, 2], [-1, *[0] * 40]], ids=len
)
def test_full_trees(rule, parents):
    """Wide, deep and beyond one warp; every sequence has its siblings drawn as the rule says."""
    generator = torch.Generator().manual_seed(22)
    case = plain_case(64, 50, generator, rule, parents)
    assert check(PLANS[2], case) < 8


def test_repeated_siblings_count_once():
    case = {
        "target_logits": torch.zeros(4, 3),
        "cu_rows": torch.tensor([0, 4], dtype=torch.int32),
        "tree_token_ids": torch.tensor([[0, 1, 1, 2]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32),
        "sibling_rule": "target_only",
    }
    for sample, path in ((0.2, [1]), (0.5, [3]), (0.9, [])):
        case["uniform_samples"] = torch.full((1, 5), sample)
        found = run(Emulation(), case)[0]
        assert found.tolist() == [path + [-1] * (4 - len(path))]


def test_rows_off_the_path_may_be_anything():
    generator = torch.Generator().manual_seed(23)
    case = plain_case(32, 20, generator, "with_replacement", [-1, 0, 0, 1, 2])
    path, *_ = run(Emulation(), case)
    visited = {0, *path[0].tolist()}
    assert len(visited) < 5
    for node in set(range(5)) - visited:
        case["target_logits"][node] = math.nan
        case["draft_logits"][0, node] = math.nan
    assert run(Emulation(), case)[0][0].equal(path[0])
    case["target_logits"][0] = math.nan
    path, output, accepted_len, logprobs = run(Emulation(), case)
    assert (accepted_len[:2] < 0).tolist() == [True, False]
    assert (path[0] == -1).all()
    assert (output[0] == -1).all()
    assert (logprobs[0] == 0).all()


@pytest.mark.parametrize("emulation", PLANS[:3], ids=plan_id)
def test_invalid_rows_fail_their_sequence_alone(emulation):
    """The root's target row, its draft row, a draft row that judges nobody, and greedy ones."""
    generator = torch.Generator().manual_seed(25)
    for bad in invalid_rows(40):
        case = plain_case(5, 40, generator, "with_replacement", [-1, 0, 0])
        case["target_logits"][3] = bad
        case["draft_logits"][[2, 4], 0] = bad
        case["draft_logits"][3, 1] = bad
        case["temperature"] = torch.tensor([1.0, 1, 1, 1, 0])
        _, output, accepted_len, logprobs = run(emulation, case)
        assert (accepted_len < 0).tolist() == [False, True, True, False, False]
        assert (output[[1, 2]] == -1).all()
        assert (logprobs[[1, 2]] == 0).all()


def test_rows_outside_the_matrix_fail_their_sequence():
    generator = torch.Generator().manual_seed(26)
    case = plain_case(1, 5, generator, "target_only", [-1, 0])
    for first in (2, 1, -1):
        case["cu_rows"] = torch.tensor([first, first + 2], dtype=torch.int32)
        case["tree_token_ids"][0, 1] = case["target_logits"][1].argmax()
        case["temperature"] = torch.zeros(1)
        assert run(Emulation(), case)[2].tolist() == [-1]


@pytest.mark.parametrize("num_nodes", [1, 2, 63, 64, 65, 130])
def test_build_tree(num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    parents = random_parents(8, num_nodes, generator)
    parents[1, num_nodes // 2] = num_nodes  # neither padding nor an earlier node
    expected = reference.build_tree(parents)
    for order in range(3):
        assert same(Emulation(order=order).build_tree(parents), expected)
