"""The harness of the benchmarks: what is timed, compared and recorded."""

import json
import time

from benchmarks import harness


def test_interleaved_times_are_quantiles_in_microseconds():
    timings = harness.time_interleaved(
        {"ours": lambda: None, "peer": lambda: time.sleep(0.001)}, seconds=0
    )
    assert timings["ours"].median_us < 1000 <= timings["peer"].median_us
    for timing in timings.values():
        assert timing.p20_us <= timing.median_us <= timing.p80_us


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
