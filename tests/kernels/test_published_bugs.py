"""Bugs that verifiers elsewhere were published with, where no other test names them."""

import math

import pytest
import torch

from fastspec_kernels.testing.edge_tables import FLAT, OFF, ONE

from . import chain_cases, tree_cases
from .cases import affordable, backends_of, invalid_rows
from .chain_cases import chain_case, random_case, run, with_bitmask

pytestmark = pytest.mark.usefixtures("instruction_set")

CHAIN_BACKENDS = backends_of("verify_chain")
METHODS = ("standard", "block")


@pytest.fixture
def poisoned_memory():
    """New tensors hold NaN, or the largest integer, until something is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_row_with_nan_does_not_emit_the_rejected_token(backend, method):
    """Comparisons with NaN are false, so the residual looked empty and its argmax was token 0."""
    for bad in invalid_rows(3):
        case = chain_case([ONE, FLAT], [bad.tolist()], [0], [0.5, 0.5])
        output, accepted_len, _ = run({**case, "method": method}, backend)
        assert (output.tolist(), accepted_len.tolist()) == ([[-1, -1]], [-1])


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token", [-1, -2, -(2**31)])
def test_negative_ids_end_the_chain_and_are_not_read(backend, method, token):
    case = chain_case([FLAT] * 3, [FLAT] * 2, [1, token], [0.0, 0.0, 0.9])
    output, accepted_len, _ = run({**case, "method": method}, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[1, 2, -1]], [1])


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_left_as_they_were(backend, method):
    """A verifier that zeroed the proposal in its input for a while was seen by other programs."""
    generator = torch.Generator().manual_seed(1)
    case = with_bitmask(random_case(affordable(backend, 32), 3, 33, generator), generator)
    before = {name: value.clone() for name, value in case.items()}
    run({**case, "method": method}, backend)
    for name, value in before.items():
        assert torch.equal(case[name].nan_to_num(7), value.nan_to_num(7)), name


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_uninitialised_is_read(backend, method, poisoned_memory):
    """Draft probabilities that were never written made a verifier repeat itself."""
    generator = torch.Generator().manual_seed(2)
    for draft in ("random", "certain"):
        case = random_case(affordable(backend, 32), 3, 33, generator, draft=draft)
        chain_cases.check({**case, "method": method}, backend)


@pytest.mark.parametrize("backend", backends_of("verify_tree"))
@pytest.mark.parametrize("rule", tree_cases.RULES)
def test_nothing_uninitialised_is_read_by_trees(backend, rule, poisoned_memory):
    generator = torch.Generator().manual_seed(3)
    tree_cases.check(
        tree_cases.random_case(affordable(backend, 32), 7, 33, generator, rule), backend
    )


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
def test_a_target_row_with_nan_does_not_raise_anything_to_certainty(backend):
    """NaN replaced by 0 left all of the probability to the other tokens."""
    case = chain_case([[math.nan, 0.0, OFF], FLAT], [ONE], [1], [0.0, 0.5])
    assert run(case, backend)[1].tolist() == [-1]


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
@pytest.mark.parametrize("num_draft", [3, 5, 6, 7])
def test_numbers_of_proposals_that_are_no_power_of_two(backend, num_draft):
    case = chain_case(
        [FLAT] * (num_draft + 1), [FLAT] * num_draft, [2] * num_draft, [0.5] * (num_draft + 1)
    )
    output, accepted_len, _ = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[*[2] * num_draft, 1]], [num_draft])


@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
def test_top_k_that_removes_the_proposal_from_the_target(backend):
    case = chain_case([[3.0, 2.0, 1.0], FLAT], [[1.0, 2.0, 3.0]], [2], [0.0, 0.9], top_p=0.9)
    case["top_k"] = torch.tensor([2], dtype=torch.int32)
    output, accepted_len, _ = run(case, backend)
    assert (output.tolist(), accepted_len.tolist()) == ([[0, -1]], [0])
