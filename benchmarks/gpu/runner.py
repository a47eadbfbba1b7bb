"""Runs the steps within the time: each is a subprocess with a deadline, killed when it is over."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.state import DONE, FAILED, NOT_RUN, SKIPPED, UNFINISHED, Outcome, State
from benchmarks.gpu.steps import ROOT, Command, Context, Step
from benchmarks.gpu.steps import UNFINISHED as UNFINISHED_STATUS

RESERVE = 25.0  # seconds kept for the report
LEAST = 5.0  # a step that could not run as long is not begun
TICK = 15.0  # seconds between two signs of life
GRACE = 5.0  # a step is asked to stop so long before it is killed


class Runner:
    """Goes through steps until the time is up."""

    def __init__(self, state: State, context: Context, minutes: float):
        self.state, self.context = state, context
        self.start, self.total = time.monotonic(), minutes * 60

    def remaining(self) -> float:
        return self.total - (time.monotonic() - self.start)

    def say(self, text: str) -> None:
        elapsed = time.monotonic() - self.start
        print(f"[{elapsed:5.0f} s, {self.remaining():5.0f} s left] {text}", flush=True)

    def run_all(self, steps: tuple[Step, ...], report: Step) -> None:
        shares = sum(step.share for step in steps)
        stretch = 1.0 / shares if 0 < shares < 1 else 1.0  # few steps share all of the time
        for step in steps:
            if self.state.is_done(step.name):
                self.say(f"{step.name}: done before")
                continue
            most = stretch * step.share * self.total
            seconds = min(most, self.remaining() - min(RESERVE, self.total / 4))
            if seconds < LEAST:
                self.say(f"{step.name}: not run, no time left")
                self.state.set(step.name, Outcome(NOT_RUN, detail="no time left"))
                continue
            self.run(step, seconds)
        self.run(report, max(self.remaining(), LEAST))

    def run(self, step: Step, seconds: float) -> None:
        """One step, its output shown and kept in NAME.log."""
        context = replace(self.context, until=time.time() + seconds - GRACE)
        command = step.command(context)
        if command.skipped:
            self.say(f"{step.name}: skipped: {command.skipped}")
            self.state.set(step.name, Outcome(SKIPPED, detail=command.skipped))
            return
        self.say(f"{step.name}: at most {seconds:.0f} s")
        before = time.monotonic()
        log = self.context.out / f"{step.name}.log"
        status = run_with_deadline(command, log, seconds, lambda: self.say(f"  {last_line(log)}"))
        took = round(time.monotonic() - before, 1)
        outcome = outcome_of(status, took, last_line(log))
        self.say(f"{step.name}: {outcome.status} after {took:.0f} s: {outcome.detail}")
        self.state.set(step.name, outcome)


def run_with_deadline(
    command: Command, log: Path, seconds: float, tick: Callable[[], None]
) -> int | None:
    """The exit status, or None where the deadline ended the process and all its children."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        **command.environment,
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            command.arguments,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _wait(process, time.monotonic() + seconds, tick)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen, end: float, tick: Callable[[], None]) -> int | None:
    """Wait until `end` at most, with a sign of life now and then."""
    while (left := end - time.monotonic()) > 0:
        try:
            return process.wait(timeout=min(left, TICK))
        except subprocess.TimeoutExpired:
            tick()
    return None


def outcome_of(status: int | None, seconds: float, detail: str) -> Outcome:
    if status is None:
        return Outcome(UNFINISHED, seconds, f"stopped at its deadline; last output: {detail}")
    names = {0: DONE, UNFINISHED_STATUS: UNFINISHED}
    if status not in names:
        detail = f"exit status {status}; last output: {detail}"
    return Outcome(names.get(status, FAILED), seconds, detail)


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
