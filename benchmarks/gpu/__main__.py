"""One command for a GPU machine: `python -m benchmarks.gpu --out DIR --minutes N [--dry-run]`."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu.runner import Runner
from benchmarks.gpu.state import FAILED, NOT_RUN, UNFINISHED, State
from benchmarks.gpu.steps import REPORT, STEPS, Context

DESCRIPTION = (
    "Measure the GPU, build the CUDA kernels, test them, run compute-sanitizer and the benchmarks,"
    " and write records, tables and plots to DIR. A second call with the same DIR goes on where the"
    " first one stopped. The exit status is 1 where a step failed."
)


def main(arguments: list[str] | None = None) -> int:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N")
    parser.add_argument("--again", action="append", default=[], metavar="STEP", choices=names)
    parser.add_argument("--only", action="append", default=[], metavar="STEP", choices=names)
    parser.add_argument(
        "--dry-run", action="store_true", help="every step on the CPU, with tiny shapes"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {options.minutes}")
    capability = "" if options.dry_run else find_gpu()
    if capability is None:
        print("torch sees no CUDA device here; --dry-run tries the plan on the CPU", flush=True)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if not same_kind_of_run(options.out, options.dry_run):
        print(f"{options.out} holds the results of another kind of run", flush=True)
        return 2

    state = State(options.out)
    for step in STEPS:
        if step.name in options.again:
            state.forget(step.name)
            for file in step.progress:
                (options.out / file).unlink(missing_ok=True)
    steps = tuple(step for step in STEPS if not options.only or step.name in options.only)
    context = Context(options.out.resolve(), options.dry_run, capability=capability)
    runner = Runner(state, context, options.minutes)
    runner.run_all(steps, REPORT)
    return summary(runner, steps)


def find_gpu() -> str | None:
    """The architecture to compile for, None without a GPU."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}" + ("a" if major == 9 else "")


def same_kind_of_run(folder: Path, dry_run: bool) -> bool:
    """Numbers of a dry run and of a GPU never meet in one folder."""
    file = folder / "run.json"
    kind = {"dry_run": dry_run}
    if not file.exists():
        file.write_text(json.dumps(kind) + "\n", encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8")) == kind


def summary(runner: Runner, steps: tuple) -> int:
    """Say how each step ended; 1 if one failed."""
    runner.say(f"summary, all in {runner.context.out}")
    outcomes = [(step.name, runner.state.outcomes[step.name]) for step in (*steps, REPORT)]
    for name, outcome in outcomes:
        print(f"  {name:16} {outcome.status:11} {outcome.seconds:6.1f} s  {outcome.detail}")
    failed = [name for name, outcome in outcomes if outcome.status == FAILED]
    left = [name for name, outcome in outcomes if outcome.status in (UNFINISHED, NOT_RUN)]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    print(f"left for another call: {', '.join(left) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
