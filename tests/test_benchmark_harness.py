"""The harness of the benchmarks: what is timed, compared and recorded."""

import json
from types import SimpleNamespace

from typer.testing import CliRunner

from benchmarks import harness
from fastspec.cli import app


def test_interleaved_times_are_quantiles_in_microseconds(monkeypatch):
    """On a clock of our own; of the two calls of a round the second, every fourth call slow."""
    now, calls = 0.0, 0

    def takes(seconds):
        nonlocal now, calls
        calls += 1
        now += seconds * (10 if calls % 4 == 0 else 1)

    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now))
    timings = harness.time_interleaved({"ours": lambda: takes(0.001)}, seconds=0)
    assert timings["ours"] == harness.Timing(5500.0, 1000.0, 10000.0)
    calls = 1
    timings = harness.time_interleaved(
        {"ours": lambda: takes(0.001), "peer": lambda: takes(0.002)}, seconds=0
    )
    assert timings["ours"].median_us == 1000.0
    assert timings["peer"].median_us == 2000.0


def test_record(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    timings = {"ours": harness.Timing(50.0, 40.0, 60.0), "floor": harness.Timing(20.0, 20.0, 20.0)}
    record = harness.record_of({"op": "sample", "shape": {"R": 1}}, timings)
    assert (record["median_us"], record["floor_us"], record["ratio_to_floor"]) == (50.0, 20.0, 2.5)
    assert {"cpu", "threads", "torch", "transformers", "commit", "dirty", "date"} <= set(record)
    for _ in range(2):
        harness.append("run", record)
    lines = (tmp_path / "results" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record, record]


def test_bench_records_only_inside_its_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "--record", "--prompts-file", "none.txt"])
    assert result.exit_code == 2
    assert "--record: only inside the checkout" in result.stderr
    assert "--out FILE" in result.stderr
    assert list(tmp_path.iterdir()) == []
