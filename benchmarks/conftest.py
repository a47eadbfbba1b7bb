"""The options `--record NAME` and `--full`, the cases, and the fixtures that time and record."""

import os
from collections.abc import Callable

import pytest
import torch

from . import harness, measuring
from .cases import OPS, Case, cases, fits, in_default_run


def pytest_addoption(parser):
    parser.addoption(
        "--record", metavar="NAME", help="append each result to benchmarks/results/NAME.jsonl"
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="on a CPU, all sampling sizes that fit its memory (hours) instead of a few minutes'",
    )


def pytest_generate_tests(metafunc):
    """A test of the sampling ops is called test_OP and gets every case of that op."""
    if "case" in metafunc.fixturenames:
        op = metafunc.function.__name__.removeprefix("test_")
        assert op in OPS
        chosen = selected(op, full=metafunc.config.getoption("--full"))
        ids = [f"{case.name}-{backend}" for case, backend, _ in chosen]
        metafunc.parametrize(("case", "backend", "device_type"), chosen, ids=ids)


def selected(op: str, full: bool) -> list[tuple[Case, str, str]]:
    """Case, backend and type of device: some of a CPU's sizes or all, all of a GPU's."""
    memory = {"cpu": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2}
    if torch.cuda.is_available():
        memory["cuda"] = torch.cuda.get_device_properties(0).total_memory // 2
    return [
        (case, backend, device_type)
        for device_type, size in memory.items()
        for case in cases(op, device_type)
        if fits(case, size) and (full or device_type == "cuda" or in_default_run(case))
        for backend in measuring.backends(op, device_type)
    ]


@pytest.fixture
def keep(benchmark, pytestconfig):
    """A function that shows a record, appends it where --record says, and fills the table."""

    def run(record: dict, ours: Callable) -> None:
        benchmark.extra_info.update(record)
        name = pytestconfig.getoption("--record")
        if name:
            harness.append(name, record)
        benchmark(ours)

    return run


@pytest.fixture
def compare(keep):
    """A function that times `ours` against `floor` and `peer`; call it with verified results."""

    def run(fields: dict, ours: Callable, **others: Callable) -> None:
        timings = harness.time_interleaved({"ours": ours, **others})
        keep(harness.record_of(fields, timings), ours)

    return run


@pytest.fixture
def measure(keep):
    """A function that verifies and times one case of the sampling ops."""

    def run(case: Case, backend: str, device_type: str) -> None:
        workload, record = measuring.measure(case, backend, device_type)
        keep(record, lambda: workload.ours(0))

    return run
