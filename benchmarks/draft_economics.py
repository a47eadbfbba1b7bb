"""Drafts of equal size, shallow and wide against deep and narrow: trained, timed, predicted.

`python -m benchmarks.draft_economics` trains four drafts for the bundled target with
`fastspec train draft` on the standard library's source, decodes held-out prompts with each of them,
and writes a record, a picture and the table of docs/draft-economics.md. A run that was stopped goes
on where it stopped. `--out FOLDER` names another place for the drafts.

After Yan et al., "Decoding Speculative Decoding", arXiv 2402.01528.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks import harness
from fastspec import Engine, SamplingParams, SpecConfig
from fastspec.cli.prompts import bundled_prompts
from fastspec.engine.stats import SpecStats
from fastspec.tools.bench import describe_environment, step_costs
from fastspec.tools.formulas import best_num_speculative_tokens, speed_up
from fastspec.tools.plots import require_plotting

ROOT = Path(__file__).resolve().parents[1]
RECORDS = harness.RESULTS / "draft_economics.jsonl"
PAGE, PICTURE = ROOT / "docs" / "draft-economics.md", ROOT / "docs" / "draft-economics.svg"
TABLE = re.compile(r"(<!-- table: .*?-->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
SHAPES = ((1, 448, 896), (2, 320, 768), (4, 256, 512), (8, 192, 384))  # layers, width, feed-forward
MODULES = ("argparse", "ast", "asyncio", "collections", "email", "http", "json", "logging")
PROBE_LENGTH, LONGEST = 5, 10  # K at which acceptance is measured, and the largest K considered


def trained(shape: tuple[int, int, int], folder: Path, steps: int, context: int) -> Path:
    """The folder of a draft of this shape, trained now unless it is there."""
    layers, width, feed_forward = shape
    out = folder / f"{layers}x{width}"
    if (out / "model.safetensors").exists():
        known = json.loads((out / "record.json").read_text())["steps"]
        if known != steps:
            raise SystemExit(f"{out} was trained for {known:.0f} steps; choose another --out")
        return out
    library = Path(sysconfig.get_path("stdlib"))
    found = [library / f"{name}.py" for name in MODULES]
    files = [file for file in found if file.exists()]
    files += [file for name in MODULES for file in sorted((library / name).glob("*.py"))]
    command = [sys.executable, "-m", "fastspec", "train", "draft", "--out", str(out)]
    command += ["--layers", str(layers), "--hidden-size", str(width)]
    command += ["--intermediate-size", str(feed_forward), "--steps", str(steps)]
    command += ["--context", str(context), "--checkpoint-steps", "25", "--rate", "0.001"]
    command += [part for file in files for part in ("--data", str(file))]
    command += ["--resume"] if (out / "checkpoint.pt").exists() else []
    subprocess.run(command, check=True)
    return out


def measured(drafts: list[Path], num_prompts: int, max_tokens: int, repeats: int) -> list[dict]:
    """For each draft what is accepted, what it costs, and what the two predict and bring."""
    prompts = bundled_prompts(num_prompts, False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    plain = Engine("tiny", spec="none")
    expected = [output.token_ids for output in plain.generate(prompts, params)]
    rows = []
    for draft in drafts:
        engine = Engine("tiny", draft, spec=SpecConfig(num_speculative_tokens=PROBE_LENGTH))
        stats = {"plain": SpecStats(), "draft": SpecStats()}
        for prompt in prompts:
            for name, each in (("plain", plain), ("draft", engine)):
                stats[name].add(each.generate([prompt], params)[0].stats)
        rate = chance(stats["draft"])
        cost = step_costs(stats["plain"], stats["draft"])[0] / PROBE_LENGTH
        best = max(1, best_num_speculative_tokens(rate, cost, LONGEST))
        engine.enable_spec_dec(n_spec_tokens=best)
        ratios = []
        for _ in range(repeats):
            seconds = {"plain": 0.0, "draft": 0.0}
            for prompt, ids in zip(prompts, expected, strict=True):
                for name, each in (("plain", plain), ("draft", engine)):
                    start = time.perf_counter()
                    (output,) = each.generate([prompt], params)
                    seconds[name] += time.perf_counter() - start
                    assert output.token_ids == ids, name
            ratios.append(seconds["plain"] / seconds["draft"])
        config = json.loads((draft / "config.json").read_text())
        trained_for = json.loads((draft / "record.json").read_text())
        rows.append(
            {
                "layers": config["num_hidden_layers"],
                "hidden_size": config["hidden_size"],
                "intermediate_size": config["intermediate_size"],
                "parameters": num_parameters(draft),
                "steps": trained_for["steps"],
                "train_loss": round(trained_for["train_loss"], 4),
                "acceptance_rate": round(rate, 4),
                "cost_of_a_draft_token": round(cost, 4),
                "num_speculative_tokens": best,
                "predicted_speed_up": round(speed_up(rate, best, cost), 3),
                "measured_speed_up": round(statistics.median(ratios), 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def chance(stats: SpecStats) -> float:
    """How often a draft token is accepted after accepted ones: what the formula takes."""
    rejections = sum(stats.acceptance_histogram[:PROBE_LENGTH])
    return stats.num_accepted_tokens / max(1, stats.num_accepted_tokens + rejections)


def num_parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def plot(record: dict, path: Path) -> None:
    """What depth costs and brings, and the speed-ups."""
    figure = require_plotting(path)(figsize=(9, 3), layout="constrained")
    costs, rates, speeds = figure.subplots(1, 3)
    drafts = record["drafts"]
    names = [f"{row['layers']} x {row['hidden_size']}" for row in drafts]
    costs.bar(names, [row["cost_of_a_draft_token"] for row in drafts])
    costs.set(title="cost of a draft token", ylabel="of a plain step")
    rates.bar(names, [row["acceptance_rate"] for row in drafts])
    rates.set(title="acceptance of a draft token", ylim=(0, 1))
    for name in ("predicted", "measured"):
        speeds.plot(names, [row[f"{name}_speed_up"] for row in drafts], marker="o", label=name)
    speeds.set(title="speed-up at the best K", ylim=(0, None))
    speeds.legend()
    for chart in (costs, rates, speeds):
        chart.set_xlabel("layers x width")
    figure.savefig(path)


def page(text: str, record: dict) -> str:
    """The page with its table replaced."""
    head = (
        "| draft | parameters | acceptance | cost of a draft token | best K | predicted |"
        " measured |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    )
    rows = "".join(
        f"| {row['layers']} layer{'s' * (row['layers'] > 1)}, width {row['hidden_size']} |"
        f" {row['parameters'] / 1e6:.1f} M |"
        f" {row['acceptance_rate']:.2f} | {row['cost_of_a_draft_token']:.2f} |"
        f" {row['num_speculative_tokens']} | {row['predicted_speed_up']:.2f}x |"
        f" **{row['measured_speed_up']:.2f}x** |\n"
        for row in record["drafts"]
    )
    steps, threads = record["drafts"][0]["steps"], record["threads"]
    end = (
        f"\n{steps:.0f} training steps each; {record['num_prompts']} held-out prompts,"
        f" {record['max_tokens']} tokens, greedy, all ids equal to plain decoding's."
        f" {record['cpu']}, {threads} thread{'s' * (threads > 1)}, torch {record['torch']},"
        f" {record['date'][:10]}, commit {record['commit']}.\n"
    )
    return TABLE.sub(lambda match: match[1] + head + rows + end + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "draft-economics")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--train-only", action="store_true", help="stop before timing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    drafts = [trained(shape, options.out, options.steps, options.context) for shape in SHAPES]
    if options.train_only:
        return
    record = {
        "op": "draft_economics",
        **describe_environment(),
        "target": "tiny",
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "drafts": measured(drafts, options.num_prompts, options.max_tokens, options.repeats),
    }
    harness.append_to(RECORDS, record)
    plot(record, PICTURE)
    PAGE.write_text(page(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
