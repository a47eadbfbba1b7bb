"""Writes docs/results.md, docs/gpu.md and the figures of README.md from benchmarks/results.

`python -m benchmarks.report`, or with `--check` to fail where they are out of date.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.copying_report import copying
from benchmarks.gpu.report import page_of
from benchmarks.llama_report import llama_cpp, llama_server, median_speeds
from benchmarks.serving_report import (
    agents,
    batches,
    beside,
    prefix_caching,
    serve_load,
    served,
)
from benchmarks.tables import quoted, table_head, table_row, threads, where

ROOT = Path(__file__).resolve().parents[1]
RESULTS, GPU, README = "docs/results.md", "docs/gpu.md", "README.md"
HEADLINE = re.compile(r"(<!-- headline: .*?-->\n)(.*?)(<!-- end of headline -->)", re.DOTALL)
DRAFTERS = re.compile(r"(<!-- drafters: .*?-->\n)(.*?)(<!-- end of drafters -->)", re.DOTALL)
INTRODUCTION = """# Results

`python -m benchmarks.report` writes this page from the records in `benchmarks/results/*.jsonl`.
`fastspec bench --record` adds an end-to-end record, `make bench RECORD=NAME` kernel records. All
figures on this page were measured on a CPU; [GPU figures](gpu.md) have their own page."""
METHODS = {
    "plain": "fastspec, plain",
    "speculative": "fastspec, speculative",
    "hf_generate": "Hugging Face `generate`",
    "hf_assisted": "Hugging Face assisted, same K",
    "hf_assisted_default": "Hugging Face assisted, its defaults",
}
SPEED_UP = "speculative / plain"
EARLIER_EFFICIENCY = "Runs before 2026-11-29 left the reading of prompts out of that prediction."
RATIOS = {
    "speculative / plain": "speculative / plain",
    "speculative / hf_assisted": "speculative / better Hugging Face assisted",
    "plain / hf_generate": "plain / Hugging Face `generate`",
}

# The page shows these sizes, in float32 and with Zipf's logits; the records hold the others.
HEADLINE_SIZES = {"V": 128256, "R": 1, "B": 1, "N": 16, "rows": 5, "context": 8192}


def results_page(records: list[dict]) -> str:
    """All of docs/results.md."""
    others = (
        "end_to_end",
        "first_token",
        "same_ids",
        "copying",
        "llama_cpp",
        "llama_server",
        "batches",
        "served",
        "serve_load",
        "agent",
        "beside",
    )
    ops = [record for record in records if record["op"] not in others]
    first_tokens = [record for record in records if record["op"] == "first_token"]
    parts = [INTRODUCTION, "## End to end"]
    if chains := chain_runs(records):
        parts.append(end_to_end(chains[-1]))
    else:
        parts.append("No end-to-end run is recorded yet.")
    if real := real_runs(records):
        parts += ["## SmolLM2-135M-Instruct", smollm2(real)]
    if runs := [record for record in records if record["op"] == "same_ids"]:
        parts += ["### Same ids as `generate`", same_ids(runs[-1])]
    if runs := [record for record in records if record["op"] == "copying"]:
        parts += ["### Drafters that copy, by kind of prompt", copying(runs[-1])]
    if peers := {r["dtype"]: r for r in records if r["op"] == "llama_cpp"}:
        parts += ["### Plain decoding compared with llama.cpp", llama_cpp(list(peers.values()))]
    if runs := [record for record in records if record["op"] == "llama_server"]:
        parts += ["### Speculation compared with llama.cpp", llama_server(runs[-1])]
    if bundled := latest_of_methods(records):
        parts += ["## Drafters", methods(bundled)]
    if first_tokens:
        parts += ["## Prefix caching", prefix_caching(first_tokens)]
    if runs := [record for record in records if record["op"] == "lenience"]:
        parts += ["## Lenience of a cascade", lenience(runs[-1])]
    if runs := [record for record in records if record["op"] == "batches"]:
        parts += ["## Batches", batches(runs[-1])]
    if runs := {r["server"]: r for r in records if r["op"] == "served"}:
        parts += ["## Serving", served([*runs.values()])]
    if runs := [record for record in records if record["op"] == "serve_load"]:
        parts += ["## Server under load", serve_load(runs[-1])]
    if turns := {r["target"]: r for r in records if r["op"] == "agent"}:
        parts += ["## Agent turns", agents([*turns.values()])]
    if runs := [record for record in records if record["op"] == "beside"]:
        parts += ["## With a busy core", beside(runs[-1])]
    if ops:
        parts += ["## Kernels", kernels(ops)]
    return "\n\n".join(parts) + "\n"


def updated(readme: str, records: list[dict]) -> str:
    """The README with its headline and the speed-ups in its table of drafters replaced.

    Those of one column are of one machine, that of its headline; without one, those of SmolLM2 are
    of the machine with the most runs.
    """
    chains, latest = chain_runs(records), latest_of_methods(records)
    beside_llama_cpp = [record for record in records if record["op"] == "llama_server"]
    sentences = [headline(run) for run in chains[-1:]]
    sentences += [headline_of_smollm2(run) for run in beside_llama_cpp[-1:]]
    if sentences:
        readme = HEADLINE.sub(lambda m: m[1] + " ".join(sentences) + "\n" + m[3], readme)
    real = real_runs(records)
    machine = [run["cpu"] for run in beside_llama_cpp[-1:]]
    machine = machine or statistics.multimode(run["cpu"] for run in real)[:1]
    real = [run for run in real if run["cpu"] in machine]
    return DRAFTERS.sub(lambda m: m[1] + with_speed_ups(m[2], latest, real) + m[3], readme)


def headline(record: dict) -> str:
    """The greedy row of an end-to-end run in one sentence."""
    (row,) = (row for row in record["results"] if row["temperature"] == 0)
    speeds, ratios = row["tokens_per_s"], row["ratios"]
    assisted = max(speeds["hf_assisted"], speeds["hf_assisted_default"])
    tokens = ", with identical output" if record["verified"] else ""
    rate = row.get("acceptance_rate")
    accepted = "" if rate is None else f", {rate:.0%} of draft tokens accepted"
    return (
        f"**{ratios['speculative / plain']:.2f}x** the speed of plain greedy decoding and"
        f" **{ratios['speculative / hf_assisted']:.2f}x** that of Hugging Face's assisted"
        f" generation with the same pair of models: {speeds['speculative']:.0f} tokens per second"
        f" against {speeds['plain']:.0f} and {assisted:.0f}{tokens}. [Record](docs/results.md):"
        f" `{record['target']['name']}` and `{record['draft']['name']}`,"
        f" K={record['num_speculative_tokens']}{accepted}, batch {record['batch_size']},"
        f" {record['dtype']}, {record['cpu']}, {threads(record)}, {record['date'][:10]}."
    )


def headline_of_smollm2(record: dict) -> str:
    """The best that llama.cpp and fastspec do on one machine, in one sentence."""
    medians = median_speeds(record)
    ours, theirs = (medians[name] for name in record["best"].values())
    return (
        f"SmolLM2-135M in {record['dtype']} answers the bundled questions at {ours:.0f} tokens per"
        f" second: **{ours / medians['fastspec plain']:.2f}x** the speed of plain decoding and"
        f" **{record['ratio_of_the_best']:.2f}x** that of llama.cpp's best draft-free method"
        f" ({theirs:.0f}), both on {threads(record)} of the {record['cpu']}, {record['date'][:10]}."
    )


def with_speed_ups(table: str, latest: dict[str, dict], real: list[dict]) -> str:
    """The table with the last four cells of each drafter's row replaced, greedy / sampled.

    They are the speed-up of the bundled models; speed-up and tokens a step of SmolLM2, of the
    settings that were fastest when greedy; and the speed of a shorter run over that of Hugging
    Face's same method, which ran beside. Each row is of runs with that kind of drafts alone.
    """

    def cells(run: dict | None, show: Callable[[dict], str]) -> str:
        rows = {row["temperature"]: row for row in run["results"]} if run else {}
        shown = [cell(rows.get(temperature), show) for temperature in (0.0, 1.0)]
        return "-" if {*shown} == {"-"} else " / ".join(shown)

    def row(match: re.Match) -> str:
        own = [run for run in real if run["method"] == match[2] and run["dtype"] == "bfloat16"]
        own = [run for run in own if kind_of_drafts(run) == match[3]]
        beside = next((run for run in own if has_peers(run)), None)
        alone = [run for run in own if not has_peers(run)] or own
        best = max(alone, key=lambda run: run["results"][0]["ratios"][SPEED_UP], default=None)
        bundled = None if match[3] else latest.get(f"`{match[2]}`")
        tokens = cells(best, lambda row: f"{row['mean_acceptance_length']:.2f}")
        shown = cells(bundled, speed_up), cells(best, speed_up), tokens, cells(beside, over_peer)
        return f"{match[1]} {' | '.join(shown)} |"

    name = r"`([a-z0-9_]+)`((?:, (?:tree|copies|copy of the target))?)"
    line = rf"^(\| {name} \|[^|]*\|[^|]*\|)(?:[^|]*\|){{4}}$"
    return re.sub(line, row, table, flags=re.MULTILINE)


def kind_of_drafts(run: dict) -> str:
    """What a row of the README's table says behind the method of such a run."""
    if run.get("tree_nodes") and run["method"] != "tree":
        return ", tree"
    if run.get("draft_bits") and run["method"] == "cascade":
        return ", copy of the target"
    return ", copies" if run.get("suffix_tokens") else ""


def chain_runs(records: list[dict]) -> list[dict]:
    """End-to-end runs of the bundled pair with a draft model's chains."""
    return [
        record
        for record in records
        if record["op"] == "end_to_end"
        and record.get("method", "draft_model") == "draft_model"
        and has_peers(record)
        and record["target"]["name"] == "tiny"
        and not kind_of_drafts(record)
        and not record.get("confidence_threshold")
    ]


def real_runs(records: list[dict]) -> list[dict]:
    """The last run of SmolLM2 on each machine with each drafter and K, alone and beside peers."""
    runs = [r for r in records if r["op"] == "end_to_end" and r["target"]["name"] == "smollm2"]
    runs.sort(key=lambda run: run["date"])
    sizes = "cpu", "threads", "dtype", "num_speculative_tokens"
    latest = {(*map(r.get, sizes), method_name(r), has_peers(r)): r for r in runs}
    return [run for _, run in sorted(latest.items())]


def has_peers(run: dict) -> bool:
    """Whether a method of Hugging Face was timed in an end-to-end run."""
    return "hf_assisted" in run["results"][0]["tokens_per_s"]


def smollm2(runs: list[dict]) -> str:
    """Table of the drafters of SmolLM2: speeds, and ratios within each run."""
    heads = ("machine", "drafter", "dtype", "T", "plain", "speculative", "`generate`")
    heads += ("better assisted", "speculative / plain", "speculative / assisted")
    lines = table_head(*heads, "plain / `generate`", "tokens per target step", "efficiency")
    for run in runs:
        for row in run["results"]:
            speeds, ratios = row["tokens_per_s"], row["ratios"]
            peers = [
                speeds[name] for name in ("hf_assisted", "hf_assisted_default") if name in speeds
            ]
            shown = speeds["plain"], speeds["speculative"], speeds.get("hf_generate")
            shown = (*shown, max(peers, default=None))
            drafter = f"{method_name(run)}, K={run['num_speculative_tokens']}"
            cells = [run["cpu"], drafter, run["dtype"], f"{row['temperature']:g}"]
            cells += ["-" if speed is None else f"{speed:.1f}" for speed in shown]
            cells += [f"{ratios[name]:.2f}x" if name in ratios else "-" for name in RATIOS]
            cells.append(f"{row['mean_acceptance_length']:.2f}")
            lines.append(table_row(*cells, f"{row['efficiency']:.2f}"))
    notes = [
        f"`fastspec {' '.join(run['argv'])}`: {'' if run['verified'] else 'NOT '}all greedy ids"
        f" equal. {where(run)}"
        for run in runs
    ]
    meaning = (
        "New tokens per second at batch 1 for the bundled questions, programming tasks, texts to"
        " summarise and texts to edit. All methods of a run use the same weights and take turns."
        " Efficiency is the speed-up over plain divided by the predicted one."
        f" {EARLIER_EFFICIENCY}"
    )
    return "\n".join([meaning, "", *lines, "", *(f"- {note}" for note in notes)])


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
        f" five methods {verified} before timing. {where(record)}"
    )
    return "\n".join([*lines, "", conditions])


def is_of_bundled_pair(record: dict) -> bool:
    """Whether it counts for the table of drafters: bundled prompts too, and efficiency measured."""
    has_own_prompts = {"--prompts-file", "--dataset"} & set(record["argv"])
    has_efficiency = all("efficiency" in row for row in record["results"])
    return record["target"]["name"] == "tiny" and has_efficiency and not has_own_prompts


def latest_of_methods(records: list[dict]) -> dict[str, dict]:
    """The last run of the bundled models with each drafter, on the machine of the headline."""
    runs = [r for r in records if r["op"] == "end_to_end" and is_of_bundled_pair(r)]
    machines = [(run["cpu"], run["threads"]) for run in chain_runs(records)[-1:]]
    runs = [run for run in runs if not machines or (run["cpu"], run["threads"]) in machines]
    return {method_name(run): run for run in sorted(runs, key=lambda run: run["date"])}


def methods(latest: dict[str, dict]) -> str:
    """Table of the drafters, each as last measured."""
    temperatures = sorted({row["temperature"] for r in latest.values() for row in r["results"]})
    at = [f"T={temperature:g}" for temperature in temperatures]
    columns = {
        "speed-up": speed_up,
        "tokens per target step": lambda row: f"{row['mean_acceptance_length']:.2f}",
        "efficiency": lambda row: f"{row['efficiency']:.2f}",
    }
    meaning = (
        "The bundled models with each drafter. Speed-up is over our own plain decoding. Efficiency"
        " is the speed-up divided by the one that acceptance, drafting and the reading of prompts"
        f" predict. {EARLIER_EFFICIENCY}"
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
    nodes, is_tree = record.get("tree_nodes"), record["method"] == "tree"
    tree = f" `--tree-nodes {nodes}`" if nodes and not is_tree else ""
    least = record.get("confidence_threshold")
    sure = f" `--confidence-threshold {least}`" if least else ""
    copied = f" `--suffix-tokens {n}`" if (n := record.get("suffix_tokens")) else ""
    branch = f" `--tree-suffix {n}`" if (n := record.get("tree_suffix")) else ""
    bits = f" `--draft-bits {n}`" if (n := record.get("draft_bits")) else ""
    return f"`{record['method']}`{bits}{cape}{bins}{tree}{branch}{sure}{copied}"


def speed_up(row: dict) -> str:
    return f"{row['ratios'][SPEED_UP]:.2f}x"


def over_peer(row: dict) -> str:
    ratio = row["ratios"].get("speculative / hf_assisted")
    return "-" if ratio is None else f"{ratio:.2f}x"


def cell(row: dict | None, show: Callable[[dict], str]) -> str:
    return "-" if row is None else show(row)


def same_ids(record: dict) -> str:
    """Table of the methods whose greedy ids were compared with those of transformers."""
    num_prompts = record["num_prompts"]
    lines = [
        f"Greedy ids of SmolLM2 in {record['dtype']}, compared with those of transformers'"
        f" `generate`: {record['num_tokens']} tokens for {num_prompts} chat prompts, each ended by"
        " the end-of-sequence token or by the limit (`python -m benchmarks.same_ids`).",
        "",
        *table_head("method", "prompts with equal ids", "tokens per target step"),
    ]
    for name, row in record["methods"].items():
        method = "plain decoding" if name == "none" else quoted(name)
        equal = f"{row['equal']} of {num_prompts}"
        lines.append(table_row(method, equal, f"{row['tokens_per_step']:.2f}"))
    if bounds := record.get("most_by_copies"):
        of_kinds = ", ".join(f"{kind} {most:.2f}" for kind, most in bounds.items())
        lines += [
            "",
            "A method that copied from the text alone, as `prompt_lookup` does, and always knew the"
            f" best place, would write this many tokens per target step: {of_kinds}.",
        ]
    return "\n".join([*lines, "", where(record)])


def lenience(record: dict) -> str:
    """Table of one cascade with a weak second draft, for several values of lenience."""
    second = record["second"]
    heads = ("lenience", "tokens per target pass", "acceptance rate", "draft passes per token")
    lines = [
        f"A cascade for `{record['target']}` of `{record['draft']}`, a draft model of"
        f" {second['layers']} layer and width {second['hidden_size']} that was trained for"
        f" {second['steps']} steps, and MaG, with k_matrix `{json.dumps(record['k_matrix'])}`."
        f" Greedy decoding, {record['max_tokens']} tokens for each of {record['num_prompts']}"
        " prompts; all ids equal those of plain decoding (`python -m benchmarks.lenience`).",
        "",
        *table_head(*heads),
    ]
    for row in record["results"]:
        passes = ", ".join(f"{count:.2f}" for count in row["draft_passes_per_token"])
        length, rate = row["tokens_per_target_pass"], row["acceptance_rate"]
        lines.append(table_row(f"{row['lenience']:g}", f"{length:.2f}", f"{rate:.2f}", passes))
    return "\n".join([*lines, "", where(record)])


def kernels(records: list[dict]) -> str:
    """Table of the CPU kernels at the headline sizes, as last measured.

    Of each op only the records of its last day count: older ones may be of cases since removed.
    """
    headlines = [r for r in records if r.get("backend") == "cpu" and is_headline(r)]
    last_day = {record["op"]: record["date"][:10] for record in headlines}
    latest = {
        (record["op"], shape(record), record["dtype"]): record
        for record in headlines
        if record["date"].startswith(last_day[record["op"]])
    }
    meaning = (
        "Each CPU kernel compared with what was timed in the same run; below 1, ours is faster."
        " *floor*: one read (`amax`) or copy of the data; *target amax*: one read of the target's"
        " rows only; *peer*: the same result with transformers or torch; *torch*: one sort for all"
        " filters; *torch softmax*: just the softmax of all rows; names ending in *bytes*: a copy"
        " of as many bytes as that pipeline moves."
    )
    lines = [meaning, "", *table_head("op", "shape", "median", "our time / the other's")]
    for (op, text, dtype), record in sorted(latest.items()):
        ratios = (
            f"{name.removeprefix('ratio_to_').replace('_', ' ')} {value:.3g}"
            for name, value in record.items()
            if name.startswith("ratio_to_")
        )
        microseconds = record["median_us"]
        median = f"{microseconds:,.0f} µs" if microseconds >= 100 else f"{microseconds:.3g} µs"
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


def read_records() -> list[dict]:
    """All records, each file's oldest first."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    return [
        json.loads(line)
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only fail where one is out of date")
    arguments = parser.parse_args()
    records = read_records()
    readme = (ROOT / README).read_text(encoding="utf-8")
    gpu = page_of(ROOT / "benchmarks" / "results" / "h200")
    pages = {RESULTS: results_page(records), GPU: gpu, README: updated(readme, records)}
    for name, text in pages.items():
        path = ROOT / name
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{name}: its figures are out of date; run `python -m benchmarks.report`")


if __name__ == "__main__":
    main()
