"""verify_tree against the oracle, and the cases where only one answer is right."""

import math
from functools import partial

import pytest
import torch

from fastspec_kernels import PAD_TOKEN_ID, verify_chain, verify_tree
from fastspec_kernels.testing import TREE_EDGES, assert_tree_edge

from .cases import (
    affordable,
    backends_of,
    device_of,
    invalid_rows,
    is_slow,
    sizes_and_dtypes,
)
from .chain_cases import with_bitmask
from .tree_cases import RULES, check, plain_case, random_case, run

pytestmark = pytest.mark.usefixtures("instruction_set")

BACKENDS = backends_of("verify_tree")
KINDS = [
    ("target_only", "random"),
    *[(rule, draft) for rule in RULES[1:] for draft in ("random", "smaller", "mapped")],
]
CHAIN = [-1, 0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "bitmask"])
@pytest.mark.parametrize(("rule", "draft"), KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000])
def test_random_batches(backend, rule, draft, masked, vocab, record_property):
    generator = torch.Generator().manual_seed(vocab)
    close, batch = 0, affordable(backend, 32 if vocab < 100 else 12)
    for num_nodes, dtype in sizes_and_dtypes(backend, (9, 3, 1, 40), vocab):
        case = random_case(batch, num_nodes, vocab, generator, rule, dtype, draft)
        close += check(with_bitmask(case, generator) if masked else case, backend)
    record_property("sequences_too_close_to_call", close)
    assert close <= 1 + batch // 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("gap", [6, 13, 18, 60])
def test_drawn_siblings_of_a_sure_draft(backend, rule, gap):
    """One token has all but e^-gap of the draft; the siblings after it come from the rest."""
    if gap > 14 and backend not in ("cpu", "reference"):
        pytest.skip("beyond what its fixed-point weights tell apart, and what fastspec draws")
    generator = torch.Generator().manual_seed(gap)
    batch = 8 if is_slow(backend) else 60
    case = plain_case(batch, 5, generator, rule, [-1, 0, 0, 0])
    case["draft_logits"][:, 0, 0] = case["draft_logits"][:, 0, 1:].amax(1) + gap
    case["target_logits"] = case["target_logits"].view(batch, 4, 5)
    case["target_logits"][:, 0, 0] -= 6
    case["target_logits"] = case["target_logits"].flatten(0, 1)
    case["tree_token_ids"][:, 1] = 0
    case["tree_token_ids"][:, 2:] = torch.tensor([1, 2], dtype=torch.int32)
    check(case, backend)
    _, tokens, _, _ = run(case, backend)
    _, expected, _, _ = run(case, "reference")
    assert (tokens != expected).any(1).sum() <= 1  # whatever the oracle calls close


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [4096, 4097, 50257, 128256])
def test_large_vocabularies(backend, vocab):
    generator = torch.Generator().manual_seed(vocab)
    for rule, draft in [(rule, "random") for rule in RULES] + [
        (rule, "mapped") for rule in RULES[1:]
    ]:
        case = random_case(2, 5, vocab, generator, rule, draft=draft)
        case["cu_rows"] = torch.tensor([0, 3, 8], dtype=torch.int32).minimum(case["cu_rows"][-1])
        check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "parents",
    [
        [-1, 0, 0, 0],
        [-1, 0, 0, 0, 1, 1, 2, 4, 4, 4, 7],
        [-1, 0, 1, 2, 3, 4, 5],
        [-1, *[0] * 12],
        [-1, *range(130)],
    ],
    ids=["three", "bushy", "chain", "wide", "deep"],
)
def test_plain_batches(backend, rule, parents):
    """Moderate rows, siblings chosen as the rule demands: everything can happen."""
    generator = torch.Generator().manual_seed(len(parents))
    num = affordable(backend, 120 if len(parents) < 20 else 20)
    assert check(plain_case(num, 17, generator, rule, parents), backend) < 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
def test_what_lies_beyond_a_draft_row_is_not_read(backend, rule, mapped):
    """Rejected siblings, rows of several chunks; likely logits stand after each draft row."""
    vocab, known = 9000, 8500
    generator = torch.Generator().manual_seed(5)
    batch = affordable(backend, 24)
    case = plain_case(batch, vocab, generator, rule, [-1, 0, 0, 0])
    case["uniform_samples"][:, 1:4] = 0.99
    tokens = torch.randperm(vocab, generator=generator) if mapped else torch.arange(vocab)
    rows = torch.full((batch, 4, vocab), 60.0)
    rows[..., :known] = case["draft_logits"][..., tokens[:known]]
    case["draft_logits"] = rows[..., :known]
    if mapped:
        columns = torch.arange(vocab).clamp_max(known)  # that of a token without one is the next
        case["draft_token_map"] = torch.zeros(vocab).int().scatter(0, tokens, columns.int())
    assert check(case, backend) <= batch // 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("uniform", "token"), [(0.2, 1024), (0.3, 1024), (0.6, 5000), (0.9, 5000)])
def test_rejected_children_leave_their_part_of_a_row_to_others(backend, uniform, token):
    """Kernels add up a row in parts, and take rejected children out of the sums of theirs."""
    row = torch.full((9000,), -math.inf)
    row[[0, 512, 1024, 5000]] = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    case = {
        "target_logits": row.repeat(4, 1),
        "cu_rows": torch.tensor([0, 4], dtype=torch.int32),
        "tree_token_ids": torch.tensor([[7, 0, 512, 512]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32),
        "uniform_samples": torch.tensor([[0.85, 0.0, 0.0, 0.0, uniform]]),
        "sibling_rule": "target_only",
    }
    path, output, accepted_len, logprobs = run(case, backend)
    assert (accepted_len.tolist(), path[0, 0].item()) == ([0], PAD_TOKEN_ID)
    assert output.tolist() == [[token, *[PAD_TOKEN_ID] * 3]]
    torch.testing.assert_close(logprobs[0, 0].item(), math.log(0.1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [4096, 9000])
def test_what_a_rejected_child_leaves_is_small_but_possible(backend, vocab):
    """Eight of the others count where sums are rounded, and one alone does not."""
    row = torch.full((vocab,), -math.inf)
    row[5] = 0
    row[100:] = -22.9
    case = {
        "target_logits": row.repeat(2, 1),
        "cu_rows": torch.tensor([0, 2], dtype=torch.int32),
        "tree_token_ids": torch.tensor([[7, 5]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0]], dtype=torch.int32),
        "uniform_samples": torch.tensor([[1 - 2**-24, 0.0, 0.5]]),
        "sibling_rule": "target_only",
    }
    _, output, accepted_len, logprobs = run(case, backend)
    assert accepted_len.tolist() == [0]
    assert output[0, 0].item() in (5, *range(100, vocab))
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edge", TREE_EDGES, ids=lambda edge: edge.name)
def test_edges(backend, edge):
    verify = partial(verify_tree, backend=backend)
    assert_tree_edge(verify, edge, device_of(backend))
    _, output, _, logprobs = verify(**edge.arguments(device_of(backend)))
    emitted = output >= 0
    assert torch.isfinite(logprobs[emitted]).all()
    assert (logprobs[~emitted] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_chain_gives_what_verify_chain_gives(backend, rule):
    """With one child per node every rule is that of a chain; target_only that of certain ones."""
    batch, num_draft, vocab = affordable(backend, 120), 3, 17
    generator = torch.Generator().manual_seed(2)
    tree = plain_case(batch, vocab, generator, rule, CHAIN)
    sampled = rule != "target_only"
    draft_logits = tree["draft_logits"][:, :num_draft].contiguous() if sampled else None
    # The number of a decision is that of the node that decides, or of the child it is about.
    columns = [1, 2, 3, 4] if sampled else [0, 1, 2, 4]
    output, accepted_len, logprobs = (
        out.cpu()
        for out in verify_chain(
            tree["target_logits"].to(device_of(backend)),
            tree["cu_rows"].to(device_of(backend)),
            tree["tree_token_ids"][:, 1:].contiguous().to(device_of(backend)),
            tree["uniform_samples"][:, columns].to(device_of(backend)),
            draft_logits=draft_logits.to(device_of(backend)) if sampled else None,
            backend=backend,
        )
    )
    _, tree_output, tree_len, tree_logprobs = run(tree, backend)
    same = (tree_output == output).all(-1)
    assert (~same).sum() <= 1  # a number may lie within rounding of a decision
    assert torch.equal(tree_len[same], accepted_len[same])
    torch.testing.assert_close(tree_logprobs[same], logprobs[same])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_the_walk_judges_only_the_rows_it_comes_by(backend, rule):
    """The root accepts its only child for certain; rows of others may hold anything."""
    vocab, sure = 40, torch.full((40,), -math.inf)
    sure[7] = 0.0
    parents = [-1, 0, 0, 1, 2]
    for bad in invalid_rows(vocab):
        target = torch.zeros(5, vocab)
        target[0] = target[1] = sure
        target[2], target[4] = bad, bad
        draft = torch.zeros(1, 5, vocab)
        draft[0, 0] = draft[0, 1] = sure
        draft[0, 2:] = bad  # row 3 is that of a leaf
        case = {
            "target_logits": target,
            "cu_rows": torch.tensor([0, 5], dtype=torch.int32),
            "tree_token_ids": torch.tensor([[0, 7, 7, 7, 7]], dtype=torch.int32),
            "parents": torch.tensor([parents], dtype=torch.int32),
            "uniform_samples": torch.full((1, 6), 0.5),
            "sibling_rule": rule,
            "draft_logits": None if rule == "target_only" else draft,
        }
        path, output, accepted_len, _ = run(case, backend)
        assert path.tolist() == [[1, 3, -1, -1, -1]]
        assert output[0, :2].tolist() == [7, 7]
        spoiled = [("target_logits", 0), ("target_logits", 1), ("target_logits", 3)]
        if rule != "target_only":
            spoiled += [("draft_logits", 0), ("draft_logits", 1)]
        for name, row in spoiled:
            rows = case[name].clone()
            rows.view(5, vocab)[row] = bad
            path, output, accepted_len, logprobs = run({**case, name: rows}, backend)
            assert accepted_len.tolist() == [-1], (name, row)
            assert (path == PAD_TOKEN_ID).all()
            assert (output == PAD_TOKEN_ID).all()
            assert (logprobs == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_without_a_row_do_not_exist(backend):
    """Two rows: node 2, though likely, is not there, and node 1 is a leaf."""
    case = {
        "target_logits": torch.zeros(2, 1),
        "cu_rows": torch.tensor([0, 2], dtype=torch.int32),
        "tree_token_ids": torch.zeros(1, 4, dtype=torch.int32),
        "parents": torch.tensor([[-1, 0, 1, 2]], dtype=torch.int32),
        "uniform_samples": torch.zeros(1, 5),
        "sibling_rule": "target_only",
    }
    path, output, accepted_len, _ = run(case, backend)
    assert path.tolist() == [[1, -1, -1, -1]]
    assert (output.tolist(), accepted_len.tolist()) == ([[0, 0, -1, -1]], [1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_no_rows_at_all(backend, batch, rule):
    case = {
        "target_logits": torch.zeros(0, 5),
        "cu_rows": torch.zeros(batch + 1, dtype=torch.int32),
        "tree_token_ids": torch.zeros(batch, 2, dtype=torch.int32),
        "parents": torch.tensor([[-1, 0]], dtype=torch.int32).repeat(batch, 1),
        "uniform_samples": torch.zeros(batch, 3),
        "sibling_rule": rule,
        "draft_logits": None if rule == "target_only" else torch.zeros(batch, 2, 5),
    }
    path, output, accepted_len, logprobs = run(case, backend)
    assert path.tolist() == output.tolist() == [[-1, -1]] * batch
    assert accepted_len.tolist() == [0] * batch
    assert logprobs.tolist() == [[0.0, 0.0]] * batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [-1.0, math.nan])
def test_invalid_temperature(backend, temperature):
    case = plain_case(1, 5, torch.Generator().manual_seed(0), "target_only", CHAIN)
    path, output, accepted_len, _ = run(
        {**case, "temperature": torch.tensor([temperature])}, backend
    )
    assert accepted_len.tolist() == [-1]
    assert path.tolist() == output.tolist() == [[-1] * 4]
