"""`fastspec simulate`: a drafter against stored outputs, with no target model."""

import json
import statistics
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fastspec.cli.display import counted, number, progress_bar, table_of
from fastspec.cli.errors import begin, note
from fastspec.cli.options import AsJson, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import require
from fastspec.config.files import require_file, write_whole, writing
from fastspec.config.methods import drafting_method
from fastspec.tools.plots import plot_acceptance, require_plotting
from fastspec.tools.settings import Models

if TYPE_CHECKING:
    from fastspec.engine.stats import SpecStats
    from fastspec.tools.simulate import Simulation
    from fastspec.tools.stored_outputs import StoredOutput


# Of SpecConfig: what a text that is known can be drafted with.
_SIMULATED = (
    *("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "bigram_path"),
    *("k_matrix", "lenience", "mag_surplus", "tree_width", "tree_nodes", "tree_paths", "cape"),
    *("cape_bins", "suffix_max_spec_factor", "suffix_min_token_prob"),
)


@command
def simulate(
    outputs_file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Stored outputs: JSON lines from generate --save-outputs or with lists of ids, ids"
            " joined by '_' (CS-Drafting), or printed tensors (Decoding Speculative Decoding).",
        ),
    ],
    models: Annotated[Models, Flags("target", "draft")],
    spec: Annotated[SpecConfig, Flags(*_SIMULATED, method="draft_model")],
    config: Annotated[EngineConfig, Flags("dtype", "device", "max_batch_size")],
    prompts: Annotated[PromptOptions, Flags(without=("chat",), shown={"num_prompts": "all"})],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of new tokens in the stored run, if the file does not say"
            " (CS-Drafting used 200): shorter texts ended by themselves. By default each text's"
            " length.",
        ),
    ] = None,
    draft_seconds: Annotated[
        float | None, typer.Option(help="Seconds per draft token, to predict tokens per second.")
    ] = None,
    verify_seconds: Annotated[
        float | None, typer.Option(help="Seconds per target pass, to predict tokens per second.")
    ] = None,
    log: Annotated[
        Path | None, output_file("Write how many tokens match after each pass, as [N].")
    ] = None,
    log_rows: Annotated[
        int, typer.Option(min=1, help="Number of outputs per line of --log, as [N, N].")
    ] = 1,
    plot: Annotated[Path | None, output_file("Plot the counts; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count how many of a drafter's tokens stored outputs would have accepted.

    The outputs are those of --target, whose weights are not read. If the file contains only new
    ids, --prompts-file or --dataset gives the prompts, in order.
    """
    method = drafting_method(spec.method)
    if (draft_seconds is None) != (verify_seconds is None):
        raise ValueError("draft_seconds, verify_seconds: give both or neither")
    if draft_seconds is not None and (method.sets_length or spec.drafts_trees or spec.cape):
        raise ValueError("draft_seconds: not for cascades and trees, whose costs vary")
    if log_rows > 1 and log is None:
        raise ValueError("log_rows: needs --log")
    for name, seconds in (("draft_seconds", draft_seconds), ("verify_seconds", verify_seconds)):
        fits = seconds is None or (0 <= seconds < inf and (seconds or name == "draft_seconds"))
        require(name, seconds, bool(fits), "seconds >= 0, > 0 for a target pass")
    require_file("outputs", outputs_file)
    texts = prompts.named() or None
    if plot is not None:
        require_plotting(plot)
    begin()
    from fastspec.models.loading import load_tokenizer, target_decoder_start, target_vocab_size
    from fastspec.tools.simulate import Simulator
    from fastspec.tools.stored_outputs import drafting_of, read_outputs

    target = models.target
    start_id, tokenizer = target_decoder_start(target), load_tokenizer("target", target)
    outputs = read_outputs(outputs_file, texts, start_id, max_tokens)
    if others := sorted({o.target for o in outputs if o.target is not None} - {target}):
        note(f"{outputs_file} has outputs of the target {others[0]}, not of {target}")
    given = models.drafts(method.name), target_vocab_size(target), tokenizer, spec, config, start_id
    simulator = Simulator(target, *given)
    with progress_bar("tokens") as bar:
        total = sum(len(output.token_ids) for output in outputs)
        task = bar.add_task("simulating", total=total)
        simulations = simulator.run(outputs, lambda count: bar.advance(task, count))
    report = _report(simulator.stats, outputs, simulations)
    drafting = drafting_of(spec, method.name, spec.num_draft_tokens())
    differing = (o.drafting for o in outputs if o.drafting not in (None, drafting))
    report["stored_with"] = next(differing, None)  # where that is not as simulated here
    if draft_seconds is not None and verify_seconds is not None:
        report["predicted"] = _predicted(report["rates"], draft_seconds, verify_seconds)
    if log is not None:
        with writing("log", log):
            write_whole("".join(f"{line}\n" for line in _log(simulations, log_rows)), log)
    if plot is not None:
        plot_acceptance(simulator.stats, report["rates"], plot)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(Console(highlight=False), report)


def _log(simulations: "list[Simulation]", num_rows: int) -> Iterator[list[int]]:
    """Tokens that match after each pass, for num_rows outputs at a time; finished ones wait."""
    for first in range(0, len(simulations), num_rows):
        rows = [simulation.matched for simulation in simulations[first : first + num_rows]]
        for place in range(max(map(len, rows))):
            yield [row[min(place, len(row) - 1)] for row in rows]


def _report(
    stats: "SpecStats", outputs: "list[StoredOutput]", simulations: "list[Simulation]"
) -> dict:
    from fastspec.tools.formulas import acceptance_by_position

    known = [
        simulation.accepted == output.accepted
        for output, simulation in zip(outputs, simulations, strict=True)
        if output.accepted is not None
    ]
    return {
        "num_outputs": len(outputs),
        **{key: value for key, value in stats.to_dict().items() if key != "seconds"},
        "rates": acceptance_by_position(step for s in simulations for step in s.steps),
        "means_by_prompt": [s.stats.mean_acceptance_length for s in simulations],
        "accepted": [simulation.accepted for simulation in simulations],
        "num_known": len(known),
        "num_reproduced": sum(known),
    }


def _told(drafting: dict) -> str:
    """How a run drafted, in words."""
    others = {**drafting}
    method, num = others.pop("method"), others.pop("num_speculative_tokens")
    return ", ".join([f"{method}, K={num}", *(f"{name}={v}" for name, v in others.items())])


def _predicted(rates: list[float], draft_seconds: float, verify_seconds: float) -> list[dict]:
    """Tokens per second for each K up to the simulated one, and the ratio to plain decoding."""
    from fastspec.tools.formulas import expected_tokens_by_position, throughput

    rows = []
    for num in range(len(rates) + 1):
        tokens = expected_tokens_by_position(rates[:num])
        speed = throughput(tokens, num * draft_seconds, verify_seconds)
        ratio = speed * verify_seconds
        rows.append({"k": num, "tokens_per_pass": tokens, "tokens_per_s": speed, "ratio": ratio})
    return rows


def _show(console: Console, report: dict) -> None:
    console.print(
        f"{counted(report['num_outputs'], 'output')},"
        f" {counted(report['num_output_tokens'], 'token')} in"
        f" {counted(report['num_steps'], 'target pass')},"
        f" acceptance rate {number(report['acceptance_rate'])}"
    )
    means, together = report["means_by_prompt"], number(report["mean_acceptance_length"])
    console.print(f"Tokens per pass, all outputs together: {together}")
    console.print(
        f"Tokens per pass, each output by itself: {number(statistics.fmean(means))} on average,"
        f" {number(min(means))} to {number(max(means))}"
    )
    if report["stored_with"] is not None:
        console.print(
            f"The stored run used {_told(report['stored_with'])}, so its accepted counts are not"
            " compared."
        )
    elif report["num_known"]:
        is_same = report["num_reproduced"] == report["num_known"]
        more = "" if is_same else "; it may have used another drafter or other options"
        console.print(
            f"The accepted counts equal those of the stored run in {report['num_reproduced']} of"
            f" {counted(report['num_known'], 'output')}{more}."
        )
    table = table_of(
        "draft tokens", "passes that accepted this many", "acceptance rate at this position"
    )
    rates = [None, *report["rates"]]
    histogram = report["acceptance_histogram"]
    for count in range(max(len(rates), len(histogram))):
        passes = histogram[count] if count < len(histogram) else 0
        rate = rates[count] if count < len(rates) else None
        table.add_row(str(count), str(passes), number(rate))
    console.print(table)
    if "predicted" in report:
        table = table_of("K", "expected tokens per pass", "predicted tokens/s", "over plain")
        for row in report["predicted"]:
            cells = (number(row["tokens_per_pass"]), number(row["tokens_per_s"], 1))
            table.add_row(str(row["k"]), *cells, f"{row['ratio']:.2f}x")
        console.print(table)
        best = max(report["predicted"], key=lambda row: row["tokens_per_s"])
        more = ", the longest draft here" if best is report["predicted"][-1] else ""
        console.print(f"Best K: {best['k']}{more}, {best['ratio']:.2f}x plain decoding")
