"""Writes the tables (report.md) and, where matplotlib is installed, the plots of a GPU run."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import options
from benchmarks.gpu.predict import predicted
from benchmarks.gpu.resource_model import GOALS
from benchmarks.gpu.state import State
from benchmarks.tables import table_head, table_row

PEERS = (
    "peer",
    "torch",
    "torch_softmax",
    "flashinfer",
    "flashinfer_bytes",
    "vllm_v2_bytes",
    "sglang_bytes",
)
INTRODUCTION = """\
# On a GPU

`python -m benchmarks.report` writes this page from the records in `benchmarks/results/h200`, which
the modules of `make gpu` made on one otherwise idle NVIDIA H200. Kernels changed between runs, so
each case names the commit that was measured. These were filled in afterwards, because the copy of
the repository on that machine had no history of its own. The CUDA kernels of row_stats,
logits_to_probs, sample, sample_coupled and verify_chain exist at those commits only.

The engine's times are of [a fifth run](kernels.md#a-fifth-run), that of EAGLE-3 with 16 sequences
of a fourth and that of Hugging Face's `generate` of a second. The kernels' times are of a first run
(commits 35ad562 and 71bd2a9), the fifth and [a sixth](kernels.md#a-sixth-run)."""
MEANING = """\
Times are medians in microseconds. The columns:

- **cold**: every call reads inputs that are not in the L2.
- **warm**: every call reads the same inputs.
- **floor**: the time to move the bytes that must move, at the copy bandwidth measured in the same
  process.
- **ours/goal**: our time over 1.3 times the floor + 4 µs for verify_chain, 2 times the floor + 8 µs
  for verify_tree, and 1.25 times the floor for attention.
- **ours/predicted**: our time over the prediction in docs/kernels.md. If it is far from 1, an
  assumption there is wrong.
- The rest is the other's time over ours, so above 1 we are faster: *peer* is Hugging Face, *torch*
  one sort, *torch_softmax* just the softmax of all rows, *flashinfer* its kernels. Names ending in
  *bytes* are a copy of as many bytes as that pipeline moves; the pipeline itself was not run. (e)
  marks wall-clock times, launches included."""
MEANING_OF_ENGINE = """\
Microseconds per token, while each of B sequences advances by one. Reading prompts is not counted.
Records of commit 508c8ad and earlier include the draft model's reading of prompts and the capture
of graphs of new sizes ([times of a round without both](kernels.md#a-fourth-run)). **floor**: one
read of the target's weights. All weights are random, so draft tokens are accepted by the toss of a
coin; a pass then yields several tokens."""


def read_lines(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def text_of(folder: Path) -> str:
    """The whole report of a run."""
    return "\n\n".join(["# GPU run", steps_table(State(folder)), *measured(folder)]) + "\n"


def page_of(folder: Path) -> str:
    """All of docs/gpu.md, from the records of one machine."""
    return "\n\n".join([INTRODUCTION, *measured(folder)]) + "\n"


def measured(folder: Path) -> list[str]:
    """The machine, the engine, the kernels, and what failed."""
    machine = {record["what"]: record for record in read_lines(folder / "machine.jsonl")}
    kernels = latest(read_lines(folder / "kernels.jsonl"))
    engine = latest(read_lines(folder / "engine.jsonl"))
    parts = []
    if machine:
        parts += ["## Machine", machine_table(list(machine.values()))]
    if engine:
        parts += ["## Engine", MEANING_OF_ENGINE, engine_table(engine)]
    if kernels:
        parts += ["## Kernels", MEANING]
    for op in sorted({record["op"] for record in kernels}):
        parts += [f"### {op}", op_table([record for record in kernels if record["op"] == op])]
    if found := latest(read_lines(folder / "breakdown.jsonl")):
        parts += ["## Where the time goes", breakdown_table(found)]
    errors = latest(read_lines(folder / "errors.jsonl"))
    if errors:
        parts += ["## Not measured", errors_table(errors)]
    return parts


def latest(records: list[dict]) -> list[dict]:
    """The last record of each case."""
    return list({json.dumps(identity(record)): record for record in records}.values())


def identity(record: dict) -> list:
    return [record[name] for name in ("op", "backend", "shape", "logits", "dtype")]


def steps_table(state: State) -> str:
    lines = table_head("step", "status", "seconds", "detail")
    for name, outcome in state.outcomes.items():
        detail = outcome.detail.replace("|", "/")
        lines.append(table_row(name, outcome.status, f"{outcome.seconds:.0f}", detail))
    return "\n".join(lines)


def machine_table(records: list[dict]) -> str:
    first = records[0]
    versions = {name: first.get(name) for name in ("cuda", "torch", "triton", "commit", "date")}
    where = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    lines = [f"{first['device']}, {where}", "", *table_head("what", "value")]
    for record in records:
        lines.append(table_row(record["what"], f"{record['value']:.4g} {record['unit']}"))
    return "\n".join(lines)


def op_table(records: list[dict]) -> str:
    peers = [name for name in PEERS if any(f"{name}_us" in record for record in records)]
    head = ("shape", "backend", "cold", "warm", "floor", "ours/floor", "ours/goal")
    head += ("ours/predicted",)
    lines = table_head(*head, *peers, "commit")
    for record in records:
        sizes = ", ".join(f"{name}={value}" for name, value in record["shape"].items())
        warm = f"{record['warm_us']:.4g}" if "warm_us" in record else "-"
        lines.append(
            table_row(
                f"{sizes}, {record['logits']}, {record['dtype']}",
                record["backend"],
                f"{record['median_us']:.4g}",
                warm,
                f"{record['floor_us']:.4g}",
                f"{record['ratio_to_floor']:.3g}",
                over_goal(record),
                over_predicted(record),
                *(ratio(record, name) for name in peers),
                commit_of(record),
            )
        )
    return "\n".join(lines)


def engine_table(records: list[dict]) -> str:
    head = ("method", "B", "context", "time", "floor", "ours/floor", "tokens per pass", "commit")
    lines = table_head(*head)
    for record in records:
        numbers = (record[name] for name in ("median_us", "floor_us", "ratio_to_floor"))
        cells = [record["backend"], *map(str, record["shape"].values())]
        cells += (f"{number:.4g}" for number in numbers)
        lines.append(table_row(*cells, f"{record['tokens_per_pass']:.3g}", commit_of(record)))
    return "\n".join(lines)


def breakdown_table(records: list[dict]) -> str:
    """Microseconds of each kernel of a call."""
    lines = table_head("op", "shape", "backend", "kernels, µs")
    for record in records:
        sizes = ", ".join(f"{name}={value}" for name, value in record["shape"].items())
        kernels = ", ".join(f"{name} {time}" for name, time in record["us"].items())
        lines.append(table_row(record["op"], sizes, record["backend"], kernels))
    return "\n".join(lines)


def commit_of(record: dict) -> str:
    return str(record.get("commit"))[:7]


def over_goal(record: dict) -> str:
    if record["op"] not in GOALS:
        return "-"
    times, plus = GOALS[record["op"]]
    return f"{record['median_us'] / (times * record['floor_us'] + plus):.3g}"


def over_predicted(record: dict) -> str:
    time = predicted(record)
    return "-" if time is None else f"{record['median_us'] / time:.3g}"


def ratio(record: dict, name: str) -> str:
    """The other's time over ours."""
    if f"{name}_us" not in record:
        return "error" if name in record.get("peer_errors", {}) else "-"
    mark = " (e)" if name in record.get("eager", ()) else ""
    return f"{record[f'{name}_us'] / record['median_us']:.3g}{mark}"


def errors_table(errors: list[dict]) -> str:
    lines = table_head("op", "shape", "backend", "error")
    for record in errors:
        error = record["error"].replace("\n", " ").replace("|", "/")[:200]
        lines.append(table_row(record["op"], str(record["shape"]), record["backend"], error))
    return "\n".join(lines)


def plot(records: list[dict], folder: Path) -> list[str]:
    """One picture per op: time over floor time, each axis logarithmic, one mark per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    for op in sorted({record["op"] for record in records}):
        figure, axes = pyplot.subplots(figsize=(6, 5))
        of_op = [record for record in records if record["op"] == op and record["floor_us"] > 0]
        for backend in sorted({record["backend"] for record in of_op}):
            chosen = [record for record in of_op if record["backend"] == backend]
            floors = [record["floor_us"] for record in chosen]
            axes.loglog(floors, [record["median_us"] for record in chosen], "o", label=backend)
        ends = [record["floor_us"] for record in of_op]
        axes.loglog([min(ends), max(ends)], [min(ends), max(ends)], "k-", label="floor")
        axes.set_xlabel("floor, µs")
        axes.set_ylabel("median, µs")
        axes.set_title(op)
        axes.legend()
        names.append(f"{op}.png")
        figure.savefig(folder / names[-1], dpi=120)
        pyplot.close(figure)
    return names


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    folder = arguments.out
    text = text_of(folder)
    records = latest(read_lines(folder / "kernels.jsonl"))
    if find_spec("matplotlib") is None:
        note = "No plots: matplotlib is not installed."
    else:
        names = plot(records, folder)
        note = "\n".join(f"![{name}]({name})" for name in names)
    (folder / "report.md").write_text(f"{text}\n{note}\n", encoding="utf-8")
    print(f"report.md: {len(records)} kernel records; {note.splitlines()[0] if note else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
