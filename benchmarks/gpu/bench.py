"""Runs the benchmarks of the sampling ops by rank until its time is up; can be continued."""

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import measuring
from benchmarks.cases import OPS, Case, cases, fits
from benchmarks.gpu import options
from benchmarks.gpu.steps import UNFINISHED
from benchmarks.harness import append

HEADLINE_RANK = 1  # the base of each axis, and one step off it
SLOWEST_CASE = 8.0  # seconds; no case is begun with less time left
TINY_VOCAB = 1000


def plan(group: str, device_type: str, memory: int) -> list[tuple[Case, str]]:
    """Cases and backends, by rank; the group "headline" is the first part of "all"."""
    everything = [
        (case, backend)
        for op in OPS
        for case in cases(op, device_type)
        if group == "all" or case.rank <= HEADLINE_RANK
        if fits(case, memory)
        for backend in measuring.backends(op, device_type)
    ]
    return sorted(everything, key=lambda item: item[0].rank)


def tiny_plan(group: str) -> list[tuple[Case, str]]:
    """A small case of each op and, in "all", rule; by the reference where a CPU has no kernel."""
    seen = {}
    for op in OPS:
        for case in cases(op, "cpu"):
            small = Case(
                op,
                min(case.vocab, TINY_VOCAB),
                1,
                case.logits,
                case.dtype,
                case.sampling,
                min(case.num_draft, 2),
                min(case.num_nodes, 4),
                case.rule,
            )
            seen.setdefault(op if group == "headline" else (op, case.rule), small)
    return [(case, (*measuring.backends(case.op, "cpu"), "reference")[0]) for case in seen.values()]


class Progress:
    """Which cases are over, one JSON line each."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.status = dict(json.loads(line) for line in lines)

    def note(self, name: str, status: str) -> None:
        self.status[name] = status
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, status]) + "\n")

    def in_turn(self, names: Iterable[str], has_time: Callable[[], bool]) -> Iterator[str]:
        """The names that have not begun, each noted as begun, while there is time for another."""
        for name in names:
            if name in self.status:
                continue
            if not has_time():
                return
            self.note(name, "began")
            yield name


def pending(
    items: Iterable[tuple[Case, str]], progress: list[Progress]
) -> Iterator[tuple[str, Case, str]]:
    for case, backend in items:
        name = f"{case.name}-{backend}"
        if not any(name in part.status for part in progress):
            yield name, case, backend


def run_one(case: Case, backend: str, device_type: str, folder: Path) -> str:
    """Measure one case and write its record or its error; "done" or what went wrong."""
    seconds = 0.0 if device_type == "cpu" else 2.0
    try:
        _, record = measuring.measure(case, backend, device_type, seconds)
    except Exception as error:  # one case must not end the run; the report shows every error
        text = f"{type(error).__name__}: {error}"[:500]
        identity = {"op": case.op, "backend": backend, "shape": case.shape, "dtype": case.dtype}
        details = {"error": text, "traceback": traceback.format_exc()[-2000:]}
        append("errors", {**identity, "logits": case.logits, **details}, folder)
        if isinstance(error, torch.AcceleratorError):
            raise  # the GPU's context is lost
        return text
    finally:
        if device_type == "cuda":
            torch.cuda.empty_cache()  # the next case may need all of the memory
    append("kernels", record, folder)
    return "done"


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--group", choices=("headline", "all"), required=True)
    arguments = parser.parse_args()
    out, group = arguments.out, arguments.group
    if arguments.dry_run:
        device_type, items = "cpu", tiny_plan(group)
    else:
        device_type = "cuda"
        items = plan(group, device_type, torch.cuda.get_device_properties(0).total_memory // 2)
    own, headline = Progress(out / f"{group}.progress"), Progress(out / "headline.progress")
    for name, case, backend in pending(items, [own, headline]):
        if options.seconds_left(arguments) < SLOWEST_CASE:
            left = sum(1 for _ in pending(items, [own, headline]))
            print(f"{len(own.status)} cases measured, {left} left", flush=True)
            return UNFINISHED
        own.note(name, "began")  # a case that takes the process with it is not begun again
        status = run_one(case, backend, device_type, out)
        own.note(name, status)
        print(f"{name}: {status}", flush=True)
    failed = [name for name, status in own.status.items() if status != "done"]
    print(f"{len(own.status)} cases, {len(failed)} failed {', '.join(failed[:3])}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
