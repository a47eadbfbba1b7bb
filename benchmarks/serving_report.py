"""The tables of docs/results.md on requests that share an engine, a server or a machine."""

from benchmarks.tables import table_head, table_row, where


def prefix_caching(records: list[dict]) -> str:
    """Table of the time to the first token where the cache holds the beginning of a prompt."""
    latest = {record["method"]: record for record in records}
    meaning = (
        "Time to the first token of a prompt whose prefix an earlier request has left in the cache,"
        " compared with reading the prompt in full, without prefix caching."
    )
    heads = ("drafter", "shared tokens", "own tokens", "cached", "read in full", "ratio")
    lines = [meaning, "", *table_head(*heads)]
    for name, record in sorted(latest.items()):
        sizes = (str(record["shape"][part]) for part in ("shared_tokens", "own_tokens"))
        times = (f"{record[part] / 1000:.0f} ms" for part in ("median_us", "peer_us"))
        ratio = f"{record['ratio_to_peer']:.3g}"
        lines.append(table_row(f"`{name}`", *sizes, *times, ratio))
    places = sorted({where(record) for record in latest.values()})
    return "\n".join([*lines, "", *places])


def agents(records: list[dict]) -> str:
    """Table of the drafters that copy, on the turns of `benchmarks/agent_trace.jsonl`."""
    meaning = (
        "Greedy decoding of 40 turns of an agent (`python -m benchmarks.agent`). Speed-up and"
        " tokens per pass refer to what the target writes. The last column simulates a target that"
        " writes exactly the recorded trace."
    )
    heads = ("target", "drafter", "speed-up", "tokens per pass", "tokens per pass, trace")
    lines = [meaning, "", *table_head(*heads)]
    for record in records:
        rows = record["generated"]
        for name, row in rows.items():
            speed = f"{row['tokens_per_s'] / rows['plain']['tokens_per_s']:.2f}x"
            trace = f"{record['replayed_trace'].get(name, 1):.2f}"
            cells = speed, f"{row['tokens_per_pass']:.2f}", trace
            lines.append(table_row(record["target"], name, *cells))
    return "\n".join([*lines, "", *sorted({where(record) for record in records})])


def beside(record: dict) -> str:
    """Table of CPU ops with one thread and with all, idle and beside a busy loop."""
    meaning = (
        "Mean microseconds per call on the CPU (`python -m benchmarks.beside`), idle and while"
        " another process keeps one core busy. Ratios are to one thread in the same state."
    )
    heads = ("call", "idle, 1 thread", "idle, all", "ratio", "busy, 1 thread", "busy, all", "ratio")
    lines = [meaning, "", *table_head(*heads)]
    columns = [
        f"{state}_{what}" for state in ("idle", "busy") for what in ("one_us", "us", "ratio")
    ]
    for row in record["results"]:
        lines.append(table_row(row["call"], *(f"{row[column]:g}" for column in columns)))
    return "\n".join([*lines, "", where(record)])


def batches(record: dict) -> str:
    """Table of one run with one request at a time, and with several."""
    size = record["batch_size"]
    heads = ("method", "batch 1", f"batch {size}", f"batch {size} / batch 1", "vs. plain, batched")
    lines = [
        f"New tokens per second of `{record['target']}`, greedy, {record['max_tokens']} tokens for"
        f" each of {size} prompts, one after another and together. Methods take turns; median of"
        f" {record['repeats']} rounds.",
        "",
        *table_head(*heads),
    ]
    for name, row in record["tokens_per_s"].items():
        alone, together = row
        ratios = record["ratios"][name]
        lines.append(
            table_row(name, f"{alone:.0f}", f"{together:.0f}", *map("{:.2f}".format, ratios))
        )
    return "\n".join([*lines, "", where(record)])


def served(records: list[dict]) -> str:
    """Table of what users of each server get, drafting and plain."""
    heads = ("users", "T", "plain", "drafting", "drafting / plain", "equal texts")
    parts = [
        "Total new tokens per second over all users. Each user asks a server the bundled questions,"
        " one after another. Both modes take turns; medians of the rounds."
    ]
    for record in records:
        lines = [f"`fastspec serve {record['server']}`:", "", *table_head(*heads)]
        for row in record["results"]:
            speeds = [f"{speed:.1f}" for speed in row["tokens_per_s"].values()]
            equal = f"{row['equal_texts']} of {row['questions']}"
            ratio = f"{row['ratio']:.2f}x"
            temperature = f"{record['temperature']:g}"
            lines.append(table_row(f"{row['users']}", temperature, *speeds, ratio, equal))
        parts += ["\n".join(lines), where(record)]
    return "\n\n".join(parts)


def serve_load(record: dict) -> str:
    """What many rude clients at once were answered, and how fast."""
    counts = record["counts"]
    heads = ("", "p50, ms", "p99, ms")
    lines = [
        f"`python -m tests.serve_load`: for {record['seconds']:.0f} s, {record['clients']} clients"
        f" of `{record['target']}` stream, wait, read slowly, disconnect midway and send malformed"
        f" or oversized bodies. {counts['compared']} answers were compared with the engine's;"
        f" {record['num_failures']} failures (a status of 500 or above, a different answer, leaked"
        f" blocks, or growing memory: {record['memory_mib'][0]} MiB, then"
        f" {record['memory_mib'][1]} MiB).",
        "",
        *table_head(*heads),
    ]
    for name in ("time_to_first_token", "time_per_token"):
        row = record[name]
        cells = f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}"
        lines.append(table_row(name.replace("_", " "), *cells))
    return "\n".join([*lines, "", where(record)])
