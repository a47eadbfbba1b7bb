"""The one command for a GPU machine: deadlines, resuming, failures, and the whole plan dry."""

import contextlib
import fcntl
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, caches, predict, report, small_shapes, steps
from benchmarks.gpu.resource_model import MACHINES, Model
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.state import State
from benchmarks.gpu.steps import Command, Context, Step

ROOT = Path(__file__).resolve().parents[2]
NOTHING = Step("report", 0.0, lambda context: steps.python("-c", "print('written')"))


def step(name: str, code: str, share: float = 0.5) -> Step:
    return Step(name, share, lambda context: steps.python("-c", code))


def run(folder: Path, *plan: Step, minutes: float = 1.0) -> dict[str, str]:
    """Run the plan; the status of each step."""
    state = State(folder)
    Runner(state, Context(folder, dry_run=True), minutes).run_all(plan, NOTHING)
    return {name: outcome.status for name, outcome in State(folder).outcomes.items()}


def test_steps_end_as_their_exit_statuses_say(tmp_path, capsys):
    statuses = run(
        tmp_path,
        step("good", "print('42 things')"),
        step("bad", "raise SystemExit('broken')"),
        step("partly", "raise SystemExit(3)"),
        Step("absent", 0.5, lambda context: Command([], {}, skipped="no such tool")),
    )
    assert statuses == {
        "good": "done",
        "bad": "failed",
        "partly": "unfinished",
        "absent": "skipped",
        "report": "done",
    }
    shown = capsys.readouterr().out
    assert re.search(r"good: done after \d+ s: 42 things", shown)
    assert "exit status 1; last output: broken" in shown
    assert "absent: skipped: no such tool" in shown
    assert "s left]" in shown
    assert (tmp_path / "bad.log").read_text() == "broken\n"


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path):
    first = step("first", "open('/dev/null')")
    assert run(tmp_path, first, step("second", "raise SystemExit(1)"))["second"] == "failed"
    never = step("first", "raise SystemExit('ran again')")
    assert run(tmp_path, never, step("second", "pass")) == {
        "first": "done",
        "second": "done",
        "report": "done",
    }


def is_released(lock: Path) -> bool:
    """Whether no process holds the lock; a killed one may take a moment to let go."""
    for _ in range(300):
        with lock.open() as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.1)
    return False


@pytest.mark.check
def test_a_step_is_killed_with_its_children_at_its_deadline(tmp_path):
    """The child holds a lock as long as it lives, and would live for minutes."""
    lock = tmp_path / "lock"
    lock.touch()
    child = f"import fcntl, time; fcntl.flock(open({str(lock)!r}), 2); time.sleep(300)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    statuses = run(tmp_path, step("endless", code, share=0.21), step("next", "pass"), minutes=0.4)
    assert statuses == {"endless": "unfinished", "next": "done", "report": "done"}
    assert is_released(lock)


def test_steps_without_time_are_not_run_and_the_report_is(tmp_path):
    statuses = run(tmp_path, step("late", "pass"), minutes=0.05)
    assert statuses == {"late": "not run", "report": "done"}


def test_names_of_steps_are_distinct():
    names = [step.name for step in (*steps.STEPS, steps.REPORT)]
    assert len(set(names)) == len(names)


def test_the_page_says_what_to_look_at_in_the_order_of_the_steps():
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)
    assert named == [step.name for step in (*steps.STEPS, steps.REPORT)]


def test_attention_and_caches_come_first():
    assert tuple(small_shapes.CHECKS)[: len(caches.OPS)] == caches.OPS
    names = [step.name for step in steps.STEPS]
    assert names.index("memcheck-triton") < names.index("caches") < names.index("headline")
    shown = [op for op, *_ in caches.tiny_plan()]
    assert tuple(shown) == caches.OPS


@pytest.mark.parametrize("case", list(caches.tiny_plan()), ids=lambda case: case[0])
def test_times_of_caches_are_verified_first(case, monkeypatch):
    op, shape, num_bytes, _ = case
    record = caches.measure(op, shape, num_bytes, "reference", "cpu")
    assert record["op"] == op
    assert record["verified"]
    reference = getattr(caches.ops, op)

    def wrong(*args, backend, **options):
        """Someone else's values: of another query, key or path."""
        if backend == "reference":
            return reference(*args, backend=backend, **options)
        place = 4 if op == "compact_kv" else 0
        args = (*args[:place], args[place] + 1, *args[place + 1 :])
        return reference(*args, backend="reference", **options)

    monkeypatch.setattr(caches.ops, op, wrong)
    with pytest.raises(AssertionError):
        caches.measure(op, shape, num_bytes, "wrong", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_fails_clearly(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked(tmp_path, capsys):
    for wrong in (["--minutes", "0"], ["--again", "nothing"]):
        with pytest.raises(SystemExit):
            command.main(["--out", str(tmp_path), *wrong])
    assert "--minutes: expected more than 0" in capsys.readouterr().err


def test_dry_numbers_do_not_meet_those_of_a_gpu(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"dry_run": false}\n')
    assert command.main(["--out", str(tmp_path), "--dry-run"]) == 2
    assert "another kind of run" in capsys.readouterr().out


def test_build_compiles_for_this_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    made = steps.build(Context(tmp_path, dry_run=False, capability="9.0a"))
    assert made.arguments[1:] == ["setup.py", "build_ext", "--inplace"]
    assert made.environment == {"FASTSPEC_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0a"}


def test_sanitizer_is_called_where_it_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "find_sanitizer", lambda: "/bin/tool")
    context = Context(tmp_path, dry_run=False, until=60)
    made = steps.sanitizer("racecheck", "triton")(context)
    assert made.arguments[:3] == ["/bin/tool", "--tool", "racecheck"]
    assert "benchmarks.gpu.small_shapes" in made.arguments
    assert made.arguments[-2:] == ["--backend", "triton"]
    monkeypatch.setattr(steps, "find_sanitizer", lambda: None)
    assert "no compute-sanitizer" in steps.sanitizer("racecheck", "triton")(context).skipped


def test_bench_plan_starts_with_the_headline(monkeypatch):
    monkeypatch.setattr(bench.measuring, "backends", lambda op, device_type: ["cuda", "triton"])
    headline = bench.plan("headline", "cuda", 70 << 30)
    everything = bench.plan("all", "cuda", 70 << 30)
    assert everything[: len(headline)] == headline
    assert len(headline) < 120 < 2000 < len(everything)


def test_bench_notes_errors_and_goes_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("kernel refused")

    monkeypatch.setattr(bench.measuring, "measure", broken)
    case, backend = bench.tiny_plan("all")[0]
    assert "kernel refused" in bench.run_one(case, backend, "cpu", tmp_path)
    [error] = report.read_lines(tmp_path / "errors.jsonl")
    assert error["op"] == case.op
    assert "kernel refused" in report.text_of(tmp_path)


def test_bench_skips_what_is_over(tmp_path):
    progress = bench.Progress(tmp_path / "all.progress")
    items = bench.tiny_plan("all")
    name = next(bench.pending(items, [progress]))[0]
    progress.note(name, "done")
    again = bench.Progress(tmp_path / "all.progress")
    assert len(list(bench.pending(items, [again]))) == len(items) - 1


def gpu_record(**changes) -> dict:
    return {
        "op": "verify_chain",
        "backend": "triton",
        "shape": {"B": 64, "K": 4, "V": 128256},
        "logits": "zipf",
        "dtype": "bfloat16",
        "median_us": 50.0,
        "warm_us": 40.0,
        "floor_us": 25.0,
        "ratio_to_floor": 2.0,
        "peer_us": 500.0,
        "eager": ["peer"],
        "vllm_v2_bytes_us": 75.0,
        "peer_errors": {"flashinfer": "ImportError"},
        **changes,
    }


def test_report_of_records(tmp_path):
    records = [gpu_record(median_us=99.0), gpu_record(), gpu_record(dtype="float32")]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "kernels.jsonl").write_text(lines)
    text = report.text_of(tmp_path)
    shown = "| B=64, K=4, V=128256, zipf, bfloat16 | triton | 50 | 40 | 25 | 2 | 1.37 | - |"
    assert f"{shown} 10 (e) | 1.5 |" in text
    assert "99" not in text


def test_report_sets_a_time_beside_the_predicted_one():
    [case] = [
        case for case in predict.cases(MACHINES[0]) if case.op == "verify_tree" and case.batch == 64
    ]
    time = Model(MACHINES[0]).time(case)
    ours = {"op": case.op, "backend": case.backend, "shape": case.shape, "median_us": 3 * time}
    record = gpu_record(**ours, device="NVIDIA H100 80GB HBM3")
    assert report.over_predicted(record) == "3"
    assert report.over_predicted({**record, "backend": "triton"}) == "-"
    assert report.over_predicted({**record, "dtype": "float32"}) == "-"
    assert report.over_predicted({**record, "device": "another"}) == "-"


@pytest.mark.check
def test_the_whole_plan_dry(tmp_path, monkeypatch):
    """As a user starts it: its own process, the repository as the working directory."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "out"
    call = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--dry-run"]
    result = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    statuses = {name: outcome.status for name, outcome in State(out).outcomes.items()}
    assert set(statuses) == {step.name for step in (*steps.STEPS, steps.REPORT)}
    assert set(statuses.values()) == {"done", "skipped"}
    records = report.read_lines(out / "kernels.jsonl")
    assert {record["op"] for record in records} == {*bench.OPS, *caches.OPS}
    assert len(records) == len(bench.tiny_plan("all")) + len(caches.OPS)
    assert all(record["verified"] for record in records)
    machine = report.read_lines(out / "machine.jsonl")
    assert {record["what"] for record in machine} >= {"copy", "read"}
    text = (out / "report.md").read_text(encoding="utf-8")
    assert all(f"### {op}" in text for op in (*bench.OPS, *caches.OPS))

    again = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0
    assert "machine: done before" in again.stdout
    assert report.read_lines(out / "kernels.jsonl") == records
