"""The parts of docs/results.md that compare with llama.cpp."""

import statistics

from benchmarks.tables import table_head, table_row, where


def llama_cpp(runs: list[dict]) -> str:
    """Tables of the peer's speeds and ours, medians of the rounds of one run."""
    names = {
        "fastspec": "fastspec, plain",
        "llama_cpp": "llama.cpp (`llama-bench`)",
        "hugging_face": "Hugging Face `generate`",
        "one_read": "one read of the weights per token",
    }

    def table(prefix: str, digits: int) -> list[str]:
        speeds = [median_speeds(run, f"{prefix}tokens_per_s") for run in runs]
        lines = table_head(
            f"{prefix}tokens per second".replace("_", " "), *(r["dtype"] for r in runs)
        )
        for name, label in names.items():
            if name in speeds[0]:
                lines.append(table_row(label, *(f"{each[name]:.{digits}f}" for each in speeds)))
        ratios = (f"**{run[f'{prefix}ratio_to_llama_cpp']:.2f}x**" for run in runs)
        return [*lines, table_row("fastspec / llama.cpp", *ratios), ""]

    size = runs[0]["prompt_tokens"]
    told = f"Reading a prompt of {size} tokens, ours and Hugging Face's with a first token:"
    lines = [*table("", 1), told, "", *table("prompt_", 0)]
    places = sorted({f"{run['llama_cpp']}. {where(run)}" for run in runs})
    return "\n".join([*lines, "`python -m benchmarks.llama_cpp`, alternating rounds.", *places])


def median_speeds(record: dict, field: str = "tokens_per_s") -> dict[str, float]:
    return {name: statistics.median(rounds) for name, rounds in record[field].items()}


def llama_server(record: dict) -> str:
    """Table of every drafter that both were run with, medians of the rounds, the fastest first."""
    medians = median_speeds(record)
    best = " over ".join(name.replace("_", " with ") for name in record["best"].values())
    lines = [
        f"Greedy answers to the {record['num_prompts']} bundled questions,"
        f" {record['tokens']} tokens each, {record['dtype']}. The best of each,"
        f" {best}: **{record['ratio_of_the_best']:.2f}x**.",
        "",
        *table_head("engine and drafter", "tokens per second", "vs. its plain decoding"),
    ]
    for name, speed in sorted(medians.items(), key=lambda pair: -pair[1]):
        plain = medians["fastspec plain" if name.startswith("fastspec") else "llama.cpp none"]
        shown = name.replace("_", " with ")
        lines.append(table_row(shown, f"{speed:.1f}", f"{speed / plain:.2f}x"))
    command = "`python -m benchmarks.llama_server`, alternating rounds."
    return "\n".join([*lines, "", command, f"{record['llama_cpp']}. {where(record)}"])
