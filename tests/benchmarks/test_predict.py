"""The predicted times of docs/kernels.md: what the model says of the committed resources."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import predict
from benchmarks.gpu.resource_model import MACHINES, Launch, Machine, Model, Phase

MACHINE = Machine("test", bandwidth=1e6, multiprocessors=4, port=10**4)
OWN = {"registers": 64, "shared": 0, "regions": {"work": {"instructions": 8, "conversions": 0}}}


def time_of(launch: Launch, **changes) -> float:
    """Without the launch itself."""
    model = Model(MACHINE, {"kernel": {**OWN, **changes}})
    return model.time_of_launch(launch) - MACHINE.launch


def test_the_page_is_what_the_model_says():
    page = predict.PAGE.read_text(encoding="utf-8")
    assert predict.updated(page) == page, "run python -m tests.gpu.resources"


def test_every_op_is_predicted_for_one_sequence_and_many():
    shown = {(case.op, case.batch) for case in predict.cases(MACHINES[0])}
    ops = {op for op, _ in shown}
    assert ops >= {"verify_tree", "tree_attention", "store_kv", "compact_kv"}
    assert shown == {(op, batch) for op in ops for batch in (1, 64)}


def test_attention_is_predicted_as_it_is_launched():
    """Where sequences may be shared there is a merge, and of many rows a launch that has none."""
    attention = pytest.importorskip("fastspec_kernels.triton.attention")
    for case in predict.cases(MACHINES[0]):
        if not case.op.endswith("attention"):
            continue
        tokens, context = case.shape["tokens"], case.shape["context"]
        sizes = {"dtype": torch.bfloat16, "device": "meta"}
        query = torch.empty(case.batch * tokens, predict.HEADS, predict.HEAD_SIZE, **sizes)
        cache = torch.empty(1, 16, predict.KV_HEADS, predict.HEAD_SIZE, **sizes)
        table = torch.empty(case.batch, context // 16, dtype=torch.int32, device="meta")
        is_tree = case.op == "tree_attention"
        scoring = attention.Scoring(1.0)
        mask = "tree" if is_tree else "cross"
        common, _ = attention.choose(query, cache, table, mask, scoring, False)
        nodes = tokens if is_tree else 0
        kinds = attention.kinds_of_rows(query, predict.KV_HEADS, case.batch, nodes)
        assert len(case.launches) == len(kinds) + common["split"], case.shape


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_no_prediction_beats_what_must_move_or_the_launches(machine):
    model = Model(machine)
    for case in predict.cases(machine):
        assert model.time(case) > case.floor(machine), case
        assert model.time(case) > machine.launch * len(case.launches), case


def test_blocks_share_a_multiprocessor_as_far_as_its_resources_go():
    assert MACHINE.resident(registers=32, threads=256, shared=0) == 8  # 64 warps
    assert MACHINE.resident(registers=128, threads=256, shared=0) == 2
    assert MACHINE.resident(registers=129, threads=256, shared=0) == 1  # 136 are given out
    assert MACHINE.resident(registers=32, threads=128, shared=100 << 10) == 2


def test_the_slowest_of_bytes_instructions_and_loads_decides():
    streams = Phase(bytes=1e6, in_flight=1e6)
    assert time_of(Launch("kernel", 4, 256, (streams,))) == pytest.approx(4 + MACHINE.memory, 0.01)
    waits = replace(streams, in_flight=1e4)  # a hundred loads, one after the other
    assert time_of(Launch("kernel", 4, 256, (waits,))) == pytest.approx(100 * MACHINE.memory)
    works = replace(streams, elements=1e7, regions=(("work", 1),))
    issue = 8e7 / MACHINE.lanes / MACHINE.clock
    assert time_of(Launch("kernel", 4, 256, (works,))) == pytest.approx(issue + MACHINE.memory)


def test_two_blocks_of_many_staged_rows_share_a_multiprocessor():
    machine = MACHINES[0]
    [one], [many] = (predict.verify_tree(batch, machine).launches for batch in (1, 64))
    assert (one.threads, Model(machine).resident(one)) == (512, 1)
    assert (many.threads, Model(machine).resident(many)) == (256, 2)
    assert Model(machine).in_flight(many) == many.blocks > machine.multiprocessors


def test_more_registers_make_more_waves():
    waits = Launch("kernel", 8, 512, (Phase(bytes=64, in_flight=64),), memory_accesses=3)
    assert time_of(waits, registers=128) > 1.9 * time_of(waits)
