"""The sizes of the sampling benchmarks, their order, and the bytes that belong to them."""

import pytest

from benchmarks import traffic
from benchmarks.cases import OPS, OPS_WITHOUT_LOGITS, Case, cases, fits, in_default_run

BANDWIDTH = 4.3e6  # bytes per microsecond


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_all_sizes_are_there_and_the_base_comes_first(op, device_type):
    chosen = cases(op, device_type)
    assert chosen[0].rank == 0
    assert [case.rank for case in chosen] == sorted(case.rank for case in chosen)
    assert len({case.name for case in chosen}) == len(chosen)
    assert {case.batch for case in chosen} == {1, 8, 64, 256}
    if op in OPS_WITHOUT_LOGITS:
        return
    assert {case.vocab for case in chosen} == {32000, 128256, 151936, 262144}
    assert {case.logits for case in chosen} == {"zipf", "peaked", "flat"}
    assert {case.dtype for case in chosen} == {"float32", "bfloat16"}


def test_rules_and_lengths():
    chain, tree = cases("verify_chain", "cuda"), cases("verify_tree", "cuda")
    assert {case.num_draft for case in chain} == {4, 8}
    assert {case.num_nodes for case in tree} == {16, 64}
    assert {"standard", "block"} < {case.rule for case in chain}
    assert {"target_only", "without_replacement", "with_replacement"} < {c.rule for c in tree}


def test_a_cpu_takes_a_subset_of_minutes():
    chosen = [case for op in OPS for case in cases(op, "cpu") if in_default_run(case)]
    assert len(chosen) < 100
    assert {case.vocab for case in chosen} == {0, 32000, 128256}
    assert {case.batch for case in chosen} == {1, 8}
    assert {case.op for case in chosen} == set(OPS)
    assert all(fits(case, 1 << 30) for case in chosen)


def test_what_does_not_fit_is_left_out():
    largest = cases("verify_tree", "cuda")[-1]
    assert largest.input_bytes == 2 * 256 * 64 * 262144 * 4
    assert not fits(largest, largest.input_bytes)


@pytest.mark.parametrize(
    ("dtype", "rule", "floor"),
    [
        ("float32", "standard", 68.7),  # 9 rows of 64 sequences
        ("float32", "block", 68.7),
        ("float32", "draft_logsumexp", 45.8),  # 5 rows of the target, 1 of the draft
        ("bfloat16", "draft_logsumexp", 22.9),
        ("float32", "point_mass", 38.2),
    ],
)
def test_floor_of_a_chain(dtype, rule, floor):
    case = Case("verify_chain", 128256, 64, "zipf", dtype, num_draft=4, rule=rule)
    assert traffic.floor_bytes(case) / BANDWIDTH == pytest.approx(floor, abs=0.1)


def test_pipelines_of_others():
    chain = Case("verify_chain", 128256, 64, "zipf", "float32", num_draft=4, rule="standard")
    times = {name: size / BANDWIDTH for name, size in traffic.pipelines(chain).items()}
    assert times == pytest.approx({"flashinfer_bytes": 168, "vllm_v2_bytes": 76.4}, abs=0.1)
    tree = Case("verify_tree", 128256, 64, "zipf", "float32", num_nodes=16, rule="target_only")
    times = {name: size / BANDWIDTH for name, size in traffic.pipelines(tree).items()}
    assert times == pytest.approx({"sglang_bytes": 397}, abs=0.1)
    assert traffic.pipelines(cases("sample", "cpu")[0]) == {}


def test_floor_of_a_tree_counts_the_rows_that_were_visited():
    case = Case("verify_tree", 1000, 2, "flat", "bfloat16", num_nodes=16, rule="target_only")
    assert traffic.floor_bytes(case, visited_rows=5) == 5 * 1000 * 2
