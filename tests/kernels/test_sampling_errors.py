"""Every wrong argument of the sampling ops raises a ValueError that begins with its name."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastspec_kernels
from fastspec_kernels import (
    build_tree,
    logits_to_probs,
    row_stats,
    sample,
    verify_chain,
    verify_tree,
)
from fastspec_kernels.checks import check_logits

ROWS, VOCAB = 3, 7


def logits(*shape, **kwargs):
    return torch.zeros(shape or (ROWS, VOCAB), **kwargs)


BAD_LOGITS = [
    pytest.param([[1.0]], "a tensor", id="list"),
    pytest.param(logits(dtype=torch.float64), "float64", id="float64"),
    pytest.param(logits(dtype=torch.int32), "int32", id="int32"),
    pytest.param(logits(VOCAB), r"\[7\]", id="rank-1"),
    pytest.param(logits(1, ROWS, VOCAB), r"\[1, 3, 7\]", id="rank-3"),
    pytest.param(logits(ROWS, 0), "vocabulary is empty", id="no-vocabulary"),
    pytest.param(logits(VOCAB, ROWS).T, "contiguous", id="transposed"),
    pytest.param(logits(ROWS, 2 * VOCAB)[:, ::2], "contiguous", id="every-second-column"),
]

BAD_BITMASKS = [
    (torch.zeros(ROWS, 1, dtype=torch.int64), "int64"),
    (torch.zeros(ROWS, 2, dtype=torch.int32), r"\[3, 2\]"),
    (torch.zeros(1, ROWS, dtype=torch.int32), r"\[1, 3\]"),
    (torch.zeros(ROWS, dtype=torch.int32), r"\[3\]"),
    (torch.zeros(ROWS, 1, dtype=torch.int32, device="meta"), "meta"),
]

BAD_PARAMS = [
    pytest.param({name: value}, match, id=f"{name}-{match}")
    for name, good, other in [
        ("temperature", torch.float32, torch.float64),
        ("top_k", torch.int32, torch.int64),
        ("top_p", torch.float32, torch.float16),
        ("min_p", torch.float32, torch.int32),
    ]
    for value, match in [
        (1.0, "float"),
        (torch.ones(ROWS, dtype=other), str(other).removeprefix("torch.")),
        (torch.ones(ROWS + 1, dtype=good), r"\[4\]"),
        (torch.ones(ROWS, 1, dtype=good), r"\[3, 1\]"),
        (torch.ones(2 * ROWS, dtype=good)[::2], "contiguous"),
        (torch.ones(ROWS, dtype=good, device="meta"), "meta"),
    ]
]


def call_row_stats(x, **params):
    return row_stats(x, **params)


def call_logits_to_probs(x, **params):
    return logits_to_probs(x, **params)


def call_sample(x, **params):
    return sample(x, torch.zeros(ROWS), **params)


ROW_OPS = [call_row_stats, call_logits_to_probs, call_sample]


@pytest.mark.parametrize("call", ROW_OPS)
@pytest.mark.parametrize(("bad", "match"), BAD_LOGITS)
def test_logits(call, bad, match):
    with pytest.raises(ValueError, match=f"^logits: .*{match}"):
        call(bad)


@pytest.mark.parametrize("call", ROW_OPS)
@pytest.mark.parametrize(("params", "match"), BAD_PARAMS)
def test_params(call, params, match):
    (name,) = params
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        call(logits(), **params)


@pytest.mark.parametrize("call", ROW_OPS)
@pytest.mark.parametrize(("bad", "match"), BAD_BITMASKS)
def test_bitmask(call, bad, match):
    with pytest.raises(ValueError, match=f"^token_bitmask: .*{match}"):
        call(logits(), token_bitmask=bad)


@pytest.mark.parametrize("call", ROW_OPS)
def test_backend(call):
    with pytest.raises(ValueError, match=r"^backend: .*'gpu'"):
        call(logits(), backend="gpu")
    with pytest.raises(ValueError, match=r"^backend: 'cuda' cannot run .* available: .*reference"):
        call(logits(), backend="cuda")


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (torch.zeros(ROWS, dtype=torch.float64), "float64"),
        (torch.zeros(ROWS + 1), r"\[4\]"),
        (torch.zeros(ROWS, 1), r"\[3, 1\]"),
        (torch.zeros(ROWS, device="meta"), "meta"),
        (0.5, "float"),
    ],
)
def test_sample_uniform(bad, match):
    with pytest.raises(ValueError, match=f"^uniform_samples: .*{match}"):
        sample(logits(), bad)


def chain(**changes):
    """A valid call of verify_chain, three sequences with two proposals each, with changes."""
    arguments = {
        "target_logits": torch.zeros(9, VOCAB),
        "cu_rows": torch.tensor([0, 3, 6, 9], dtype=torch.int32),
        "draft_token_ids": torch.zeros(ROWS, 2, dtype=torch.int32),
        "uniform_samples": torch.zeros(ROWS, 3),
    }
    return verify_chain(**{**arguments, **changes})


@pytest.mark.parametrize(("bad", "match"), BAD_LOGITS)
def test_chain_target_logits(bad, match):
    with pytest.raises(ValueError, match=f"^target_logits: .*{match}"):
        chain(target_logits=bad)


@pytest.mark.parametrize(("params", "match"), BAD_PARAMS)
def test_chain_params(params, match):
    (name,) = params
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        chain(**params)


@pytest.mark.parametrize(
    ("name", "bad", "match"),
    [
        ("draft_token_ids", torch.zeros(ROWS, 2, dtype=torch.int64), "int64"),
        ("draft_token_ids", torch.zeros(ROWS, dtype=torch.int32), r"\[3\]"),
        ("draft_token_ids", torch.zeros(ROWS, 2, dtype=torch.int32, device="meta"), "meta"),
        ("cu_rows", torch.zeros(ROWS, dtype=torch.int32), r"\[3\]"),
        ("cu_rows", torch.zeros(ROWS + 1), "float32"),
        ("cu_rows", torch.tensor([0, 3, 6, 10], dtype=torch.int32), "at most 9 rows"),
        ("cu_rows", torch.tensor([0, 6, 3, 9], dtype=torch.int32), "prefix sums"),
        ("cu_rows", torch.tensor([1, 3, 6, 9], dtype=torch.int32), "from 0"),
        ("uniform_samples", torch.zeros(ROWS, 2), r"\[3, 2\]"),
        ("uniform_samples", torch.zeros(ROWS, 3, dtype=torch.float64), "float64"),
        ("draft_logits", torch.zeros(ROWS, 2, VOCAB, dtype=torch.float64), "float64"),
        ("draft_logits", torch.zeros(ROWS, VOCAB), r"\[3, 7\]"),
        ("draft_logits", torch.zeros(ROWS, 3, VOCAB), r"\[3, 3, 7\]"),
        ("draft_logits", torch.zeros(ROWS, 2, VOCAB + 1), "larger than the target's 7"),
        ("draft_logits", torch.zeros(ROWS, 2, 0), "vocabulary is empty"),
        ("draft_logits", torch.zeros(ROWS, VOCAB, 2).mT, "contiguous"),
        ("draft_logits", torch.zeros(ROWS, 2, VOCAB, device="meta"), "meta"),
        ("lenience", 0.5, "0.5"),
        ("lenience", math.nan, "nan"),
        ("lenience", math.inf, "inf"),
        ("method", "best", "'best'"),
        ("draft_logsumexp", torch.zeros(ROWS, 2), "needs draft_logits"),
        ("draft_token_map", torch.zeros(VOCAB, dtype=torch.int32), "needs draft_logits"),
        ("token_bitmask", torch.zeros(ROWS, 1, dtype=torch.int32), r"\[3, 1\]"),
        ("backend", "gpu", "'gpu'"),
        ("backend", "cuda", "cannot run verify_chain"),
    ],
)
def test_chain_arguments(name, bad, match):
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        chain(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad", "match"),
    [
        ("draft_logsumexp", torch.zeros(ROWS, 3), r"\[3, 3\]"),
        ("draft_logsumexp", torch.zeros(ROWS, 2, dtype=torch.float64), "float64"),
        ("draft_logsumexp", torch.zeros(2, ROWS).T, "contiguous"),
        ("draft_token_map", torch.zeros(VOCAB), "float32"),
        ("draft_token_map", torch.zeros(4, dtype=torch.int32), r"\[4\]"),
        ("draft_token_map", torch.zeros(2 * VOCAB, dtype=torch.int32)[::2], "contiguous"),
    ],
)
def test_chain_draft_extras(name, bad, match):
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        chain(draft_logits=torch.zeros(ROWS, 2, 4), **{name: bad})


def test_block_method_takes_neither_lenience_nor_logsumexp():
    with pytest.raises(ValueError, match=r"^lenience: expected 1 with method 'block', got 1\.5"):
        chain(method="block", lenience=1.5)
    drawn = {"draft_logits": torch.zeros(ROWS, 2, VOCAB), "draft_logsumexp": torch.zeros(ROWS, 2)}
    with pytest.raises(ValueError, match=r"^draft_logsumexp: method 'block'"):
        chain(method="block", **drawn)


def tree(**changes):
    """A valid call of verify_tree, two trees of three nodes each, with changes."""
    arguments = {
        "target_logits": torch.zeros(6, VOCAB),
        "cu_rows": torch.tensor([0, 3, 6], dtype=torch.int32),
        "tree_token_ids": torch.zeros(2, 3, dtype=torch.int32),
        "parents": torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32),
        "uniform_samples": torch.zeros(2, 4),
        "sibling_rule": "target_only",
    }
    return verify_tree(**{**arguments, **changes})


@pytest.mark.parametrize(("bad", "match"), BAD_LOGITS)
def test_tree_target_logits(bad, match):
    with pytest.raises(ValueError, match=f"^target_logits: .*{match}"):
        tree(target_logits=bad)


@pytest.mark.parametrize(
    ("name", "bad", "match"),
    [
        ("tree_token_ids", torch.zeros(2, 3, dtype=torch.int64), "int64"),
        ("tree_token_ids", torch.zeros(2, 0, dtype=torch.int32), "needs its root"),
        ("cu_rows", torch.tensor([0, 3, 7], dtype=torch.int32), "at most 6 rows"),
        ("parents", torch.zeros(2, 4, dtype=torch.int32), r"\[2, 4\]"),
        ("parents", torch.tensor([[-1, 0, 2]] * 2, dtype=torch.int32), "got 2 for node 2"),
        ("parents", torch.tensor([[-1, -2, 0]] * 2, dtype=torch.int32), "got -2 for node 1"),
        ("uniform_samples", torch.zeros(2, 3), r"\[2, 3\]"),
        ("sibling_rule", "best", "'best'"),
        ("draft_logits", torch.zeros(2, 3, VOCAB), "expected None with sibling_rule 'target_only'"),
        ("temperature", torch.ones(3), r"\[3\]"),
        ("token_bitmask", torch.zeros(2, 1, dtype=torch.int32), r"\[2, 1\]"),
        ("backend", "cuda", "cannot run verify_tree"),
    ],
)
def test_tree_arguments(name, bad, match):
    with pytest.raises(ValueError, match=f"^{name}: .*{match}"):
        tree(**{name: bad})


@pytest.mark.parametrize("rule", ["without_replacement", "with_replacement"])
def test_drawn_siblings_need_the_rows_they_were_drawn_from(rule):
    with pytest.raises(ValueError, match=f"^draft_logits: required with sibling_rule '{rule}'"):
        tree(sibling_rule=rule)
    with pytest.raises(ValueError, match=r"^draft_logits: expected shape \[2, 3, \*\]"):
        tree(sibling_rule=rule, draft_logits=torch.zeros(2, 2, VOCAB))


def test_sibling_rule_has_no_default():
    with pytest.raises(TypeError, match="sibling_rule"):
        verify_tree(*[None] * 5)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([[-1, 0]], "a tensor, got list"),
        (torch.zeros(3, dtype=torch.int32), r"\[3\]"),
        (torch.zeros(2, 3), "float32"),
        (torch.tensor([[-1, 1]], dtype=torch.int32), "got 1 for node 1 of tree 0"),
    ],
)
def test_build_tree(bad, match):
    with pytest.raises(ValueError, match=f"^parents: .*{match}"):
        build_tree(bad)


@pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "reference"])
@pytest.mark.parametrize("op", ["row_stats", "sample", "verify_chain", "verify_tree"])
def test_vocabularies_whose_sums_would_overflow_on_a_gpu(op, backend):
    """2**20 weights of 2**44 add up to 2**64, which is 0 in 64 bits."""
    name = "target_logits" if op.startswith("verify") else "logits"
    others = {"row_stats": 0, "sample": 1, "verify_chain": 3, "verify_tree": 4}[op]
    options = {"backend": backend}
    if op == "verify_tree":
        options["sibling_rule"] = "target_only"
    with FakeTensorMode():
        check_logits(name, fake_row(2**20 - 1), 2)
        with pytest.raises(ValueError, match=rf"^{name}: .* at most 1048575 .* got 1048576"):
            getattr(fastspec_kernels, op)(fake_row(2**20), *[None] * others, **options)


def fake_row(vocab):
    return torch.empty(1, vocab, dtype=torch.float16, device="cuda:0")


def test_valid_calls_pass():
    output, accepted_len, _ = chain()
    assert (output.shape, accepted_len.shape) == ((ROWS, 3), (ROWS,))
    assert sample(logits(), torch.zeros(ROWS))[0].tolist() == [0] * ROWS
