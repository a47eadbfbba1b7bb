"""One benchmark from inputs to record: every op and rule is verified before it is timed."""

import dataclasses

import pytest
import torch

from benchmarks import harness, measuring, workloads
from benchmarks.cases import CHAIN_RULES, LOGITS, SAMPLING, TREE_RULES, Case

BASE = {"vocab": 300, "batch": 4, "logits": "zipf", "dtype": "float32"}
CHAINS = [Case("verify_chain", **BASE, num_draft=3, rule=rule) for rule in CHAIN_RULES]
TREES = [Case("verify_tree", **BASE, num_nodes=7, rule=rule) for rule in TREE_RULES]
ROWS = [Case(op, **BASE) for op in ("sample", "row_stats", "logits_to_probs")]
OTHERS = [
    Case("build_tree", 0, 4, "none", "int32", num_nodes=7),
    Case("uniform", 0, 4, "none", "float32"),
]
SMALL = [*CHAINS, *TREES, *ROWS, *OTHERS]


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(harness, "MIN_ROUNDS", 2)


def varied(case: Case) -> list[Case]:
    """The case, and one with each other kind of row, dtype and filter."""
    others = [{"logits": kind} for kind in LOGITS[1:]] + [{"dtype": "bfloat16"}]
    others += [{"sampling": name} for name in SAMPLING if case.rule != "greedy"]
    own = [] if case in OTHERS else others
    return [case, *(dataclasses.replace(case, **change) for change in own)]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op}-{case.rule}")
def test_every_case_is_verified_and_recorded(case):
    for variant in varied(case):
        _, record = measuring.measure(variant, "reference", "cpu", seconds=0)
        assert record["op"] == case.op
        assert record["verified"] is True
        assert record["median_us"] > 0
        assert record["ratio_to_floor"] > 0
        assert record["floor_bytes"] > 0
        assert record["device"] == "cpu"


def test_fields_of_a_chain():
    _, record = measuring.measure(CHAINS[0], "reference", "cpu", seconds=0)
    assert record["shape"] == {"B": 4, "K": 3, "V": 300, "sampling": "unfiltered"}
    assert 0 <= record["mean_accepted_len"] <= 3
    names = {"peer_us", "floor_us", "vllm_v2_bytes_us", "flashinfer_bytes_us"}
    assert names <= set(record)


def off_by_one(op, part):
    """The op, whose backend "mutant" is the reference with the first value of one output off."""

    def run(*args, backend, **kwargs):
        if backend != "mutant":
            return op(*args, **kwargs, backend=backend)
        outputs = op(*args, **kwargs, backend="reference")
        parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        parts[part] = parts[part].clone()
        parts[part].view(-1)[0] += 1
        return parts[0] if isinstance(outputs, torch.Tensor) else tuple(parts)

    return run


@pytest.mark.parametrize(
    ("case", "part"),
    [
        *((CHAINS[0], part) for part in range(3)),
        *((TREES[1], part) for part in range(4)),
        *((ROWS[0], part) for part in range(2)),
        *((dataclasses.replace(ROWS[1], sampling="filtered"), part) for part in range(2)),
        (ROWS[2], 0),
        *((OTHERS[0], part) for part in range(2)),
        (OTHERS[1], 0),
    ],
    ids=lambda value: getattr(value, "op", value),
)
def test_wrong_results_are_not_timed(case, part, monkeypatch):
    monkeypatch.setattr(measuring, "_time_on_cpu", lambda *_: pytest.fail("it was timed"))
    monkeypatch.setattr(workloads.ops, case.op, off_by_one(getattr(workloads.ops, case.op), part))
    with pytest.raises(AssertionError):
        measuring.measure(case, "mutant", "cpu")
