"""The `--record NAME` option and the fixture that times, compares and records one result."""

from collections.abc import Callable

import pytest

from . import harness


def pytest_addoption(parser):
    parser.addoption(
        "--record", metavar="NAME", help="append each result to benchmarks/results/NAME.jsonl"
    )


@pytest.fixture
def compare(benchmark, pytestconfig):
    """A function that times `ours` against `floor` and `peer`; call it with verified results."""

    def run(fields: dict, ours: Callable, **others: Callable) -> None:
        timings = harness.time_interleaved({"ours": ours, **others})
        record = harness.record_of(fields, timings)
        benchmark.extra_info.update(record)
        name = pytestconfig.getoption("--record")
        if name:
            harness.append(name, record)
        benchmark(ours)

    return run
