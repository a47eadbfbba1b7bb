"""Writes the numbers of README.md from benchmarks/results: `python -m benchmarks.report`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- results: written by `python -m benchmarks.report`, not by hand -->"
END = "<!-- end of results -->"
METHODS = {
    "plain": "fastspec, plain",
    "speculative": "fastspec, speculative",
    "hf_generate": "Hugging Face `generate`",
    "hf_assisted": "Hugging Face assisted, the same K",
    "hf_assisted_default": "Hugging Face assisted, its defaults",
}
RATIOS = {
    "speculative / plain": "speculative / plain",
    "speculative / hf_assisted": "speculative / the better Hugging Face assisted",
    "plain / hf_generate": "plain / Hugging Face `generate`",
}

# The README shows these sizes, in float32 and with Zipf's logits; the records hold the others.
HEADLINE_SIZES = {"V": 128256, "R": 1, "B": 1, "N": 16, "rows": 5, "context": 8192}


def report(records: list[dict]) -> str:
    """Everything between the two markers."""
    runs = [record for record in records if record["op"] == "end_to_end"]
    chains = [run for run in runs if run.get("method", "draft_model") == "draft_model"]
    ops = [record for record in records if record["op"] != "end_to_end"]
    parts = [end_to_end(chains[-1])] if chains else ["No end-to-end run is recorded yet."]
    if bundled := [run for run in runs if is_of_bundled_pair(run)]:
        parts.append(methods(bundled))
    if ops:
        parts.append(kernels(ops))
    return "\n\n".join(parts)


def end_to_end(record: dict) -> str:
    """Table and conditions of one `fastspec bench` run."""
    rows = record["results"]
    lines = table_head("new tokens per second", *(f"T={row['temperature']:g}" for row in rows))
    for name, label in METHODS.items():
        lines.append(table_row(label, *(f"{row['tokens_per_s'][name]:.0f}" for row in rows)))
    for name, label in RATIOS.items():
        cells = (f"**{row['ratios'][name]:.2f}x**" for row in rows)
        lines.append(table_row(label, *cells))
    for name in ("acceptance_rate", "mean_acceptance_length"):
        cells = ("-" if row[name] is None else f"{row[name]:.2f}" for row in rows)
        lines.append(table_row(name.replace("_", " "), *cells))
    target, draft = record["target"], record["draft"]
    verified = "verified equal" if record["verified"] else "NOT all equal"
    conditions = (
        f"`fastspec {' '.join(record['argv'])}`: target {describe(target)},"
        f" draft {describe(draft)},"
        f" K={record['num_speculative_tokens']}, batch {record['batch_size']},"
        f" {record['num_prompts']} held-out prompts, {record['max_tokens']} new tokens each,"
        f" {record['dtype']}, median of {record['repeats']} interleaved rounds; greedy ids of all"
        f" five {verified} before timing. {where(record)}"
    )
    return "\n".join([*lines, "", conditions])


def is_of_bundled_pair(record: dict) -> bool:
    """Whether it counts for the table of drafters: bundled prompts too, and efficiency measured."""
    has_own_prompts = {"--prompts-file", "--dataset"} & set(record["argv"])
    has_efficiency = all("efficiency" in row for row in record["results"])
    return record["target"]["name"] == "tiny" and has_efficiency and not has_own_prompts


def methods(records: list[dict]) -> str:
    """Table of the drafters, each as last measured."""
    latest = {method_name(r): r for r in sorted(records, key=lambda record: record["date"])}
    temperatures = sorted({row["temperature"] for r in latest.values() for row in r["results"]})
    at = [f"T={temperature:g}" for temperature in temperatures]
    columns = {
        "speed-up": lambda row: f"{row['ratios']['speculative / plain']:.2f}x",
        "tokens per target step": lambda row: f"{row['mean_acceptance_length']:.2f}",
        "efficiency": lambda row: f"{row['efficiency']:.2f}",
    }
    meaning = (
        "The bundled models with each drafter: speed-up over our own plain decoding; efficiency:"
        " what part of the speed-up is reached that acceptance and the cost of drafting predict."
    )
    heads = [f"{column}, {temperature}" for column in columns for temperature in at]
    lines = [meaning, "", *table_head("drafter", "K", *heads)]
    for name, record in sorted(latest.items()):
        rows = {row["temperature"]: row for row in record["results"]}
        cells = [cell(rows.get(t), show) for show in columns.values() for t in temperatures]
        lines.append(table_row(name, str(record["num_speculative_tokens"]), *cells))
    places = sorted({where(record) for record in latest.values()})
    return "\n".join([*lines, "", *places])


def method_name(record: dict) -> str:
    """`--method` and the like, as it was given."""
    cape = " `--cape`" if record["cape"] else ""
    bins = f" `--cape-bins {json.dumps(b)}`" if (b := record.get("cape_bins")) else ""
    return f"`{record['method']}`{cape}{bins}"


def cell(row: dict | None, show: Callable[[dict], str]) -> str:
    return "-" if row is None else show(row)


def kernels(records: list[dict]) -> str:
    """Table of the CPU kernels at the sizes for the README, as last measured.

    Of each op only the records of its last day count: older ones may be of cases that are no more.
    """
    headlines = [r for r in records if r.get("backend") == "cpu" and is_headline(r)]
    last_day = {record["op"]: record["date"][:10] for record in headlines}
    latest = {
        (record["op"], shape(record), record["dtype"]): record
        for record in headlines
        if record["date"].startswith(last_day[record["op"]])
    }
    meaning = (
        "CPU kernels beside torch in the same run; floor: one read (`amax`) or copy of the data;"
        " target amax: one read of the target's rows alone; peer: the same result with transformers"
        " or torch; torch: one sort for all filters; torch softmax: the softmax of all rows alone;"
        " names that end in bytes: a copy of as many bytes as that pipeline moves. Below 1 we are"
        " faster."
    )
    lines = [meaning, "", *table_head("op", "shape", "median", "our time / the other's")]
    for (op, text, dtype), record in sorted(latest.items()):
        ratios = (
            f"{name.removeprefix('ratio_to_').replace('_', ' ')} {value:.3g}"
            for name, value in record.items()
            if name.startswith("ratio_to_")
        )
        median = f"{record['median_us']:.4g} µs"
        lines.append(table_row(f"`{op}`", f"{text}, {dtype}", median, ", ".join(ratios)))
    places = sorted({where(record) for record in latest.values()})
    return "\n".join([*lines, "", *places])


def is_headline(record: dict) -> bool:
    sizes = record["shape"]
    fits = all(sizes.get(name, size) == size for name, size in HEADLINE_SIZES.items())
    likely = record.get("logits", "zipf") in ("zipf", "none")
    return fits and likely and record["dtype"] in ("float32", "int32")


def shape(record: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in record["shape"].items())


def describe(model: dict) -> str:
    millions = model["parameters"] / 1e6
    return f"{model['name']} ({millions:.1f} M parameters, {model['layers']} layers)"


def where(record: dict) -> str:
    commit = f", commit {record['commit']}" if record["commit"] else ""
    return (
        f"{record['cpu']}, {record['threads']} threads, torch {record['torch']}, transformers"
        f" {record['transformers']}, {record['date'][:10]}{commit}."
    )


def table_head(*cells: str) -> list[str]:
    return [table_row(*cells), table_row("---", *["---:"] * (len(cells) - 1))]


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def read_records() -> list[dict]:
    """All records, each file's oldest first."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    return [
        json.loads(line)
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def updated(readme: str, records: list[dict]) -> str:
    """The README with the text between its markers replaced."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{report(records)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only fail if README.md is stale")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    new = updated(readme, read_records())
    if not arguments.check:
        path.write_text(new, encoding="utf-8")
    elif new != readme:
        sys.exit("README.md: its numbers are stale; run `python -m benchmarks.report`")


if __name__ == "__main__":
    main()
