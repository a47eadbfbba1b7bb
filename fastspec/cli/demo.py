"""`fastspec demo`: plain and speculative decoding side by side."""

import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fastspec.cli.display import coloured, counted, legend, number, progress_bar, table_of
from fastspec.cli.errors import begin
from fastspec.cli.options import FIXED_RUN, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions, tokenize_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.methods import drafting_method, method_named
from fastspec.models.named import own_draft, usual_spec
from fastspec.tools.settings import Models

if TYPE_CHECKING:
    from fastspec.engine.engine import Engine
    from fastspec.engine.outputs import RequestOutput

_PROMPTS = 3
_ROUNDS = 3  # timed runs of each prompt in each mode
_WARM_UP_TOKENS = 8
_PICTURE_WIDTH = 104
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways: outputs, texts in pieces, and the median seconds of each."""

    prompt: str
    plain: "RequestOutput"
    speculative: "RequestOutput"
    texts: list[Text]
    plain_seconds: float
    speculative_seconds: float


@command
def demo(
    models: Annotated[Models, Flags("target", "draft", "chat_template")],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags("dtype", "device")],
    prompts: Annotated[PromptOptions, Flags("num_prompts", "chat", num_prompts=_PROMPTS)],
    params: Annotated[
        SamplingParams,
        Flags("max_tokens", "temperature", **FIXED_RUN, max_tokens=96),
    ],
    svg: Annotated[Path | None, output_file("Write the output as an SVG image.")] = None,
) -> None:
    """Continue prompts with plain and speculative decoding, and compare both.

    At temperature 0 both outputs must be equal. The default models are the bundled pair. The
    fetched model answers questions: --target smollm2 --chat. Without --method and --draft, the
    draft that comes with the target is used, and for any other target the method suffix.
    """
    if method_named(spec.method).chooses and models.draft is None:
        spec = _usual(spec, models.target, config)
    if not method_named(spec.method).chooses:
        drafting_method(spec.method)
    models.check(spec.method)
    prompts.check_template(models)
    texts = prompts.or_bundled(_PROMPTS)
    begin()
    spec = spec.for_repeated_prompts()
    engine = models.engine(spec, config)
    ids = tokenize_prompts(engine.tokenizer, texts, prompts.chat)
    comparisons = []
    with progress_bar("runs") as bar:
        task = bar.add_task("decoding", total=len(texts))
        _compare(engine, texts[0], ids[0], replace(params, max_tokens=_WARM_UP_TOKENS))
        for prompt, token_ids in zip(texts, ids, strict=True):
            comparisons.append(_compare(engine, prompt, token_ids, params))
            bar.advance(task)
    console = Console(
        record=svg is not None, width=None if svg is None else _PICTURE_WIDTH, highlight=False
    )
    _show(console, comparisons, spec)
    agreed = _conclude(console, comparisons, params.temperature)
    if svg is not None:
        picture = console.export_svg(title="fastspec demo")
        # Without rich's web font the picture needs no network.
        svg.write_text(_FONT_FACE.sub("", picture), encoding="utf-8")
    if not agreed:
        raise typer.Exit(1)


def _usual(spec: SpecConfig, target: str, config: EngineConfig) -> SpecConfig:
    """The method for a target that is given without a draft."""
    from fastspec.models.loading import resolve_device

    spec = usual_spec(spec, target, on_cpu=resolve_device(config).type == "cpu")
    if not method_named(spec.method).chooses:
        return spec
    if own_draft(target, "draft_model") is not None:
        return replace(spec, method="draft_model")
    return spec if spec.suffix_tokens or spec.cape else replace(spec, method="suffix")


def _compare(
    engine: "Engine", prompt: str, prompt_ids: list[int], params: SamplingParams
) -> Comparison:
    from fastspec.cli.printers import Transcript

    seconds: tuple[list[float], list[float]] = ([], [])
    ways = engine.disable_spec_dec, engine.enable_spec_dec
    outputs, texts = [], []
    for _ in range(_ROUNDS):
        outputs, texts = [], []
        for turn, times in zip(ways, seconds, strict=True):
            turn()
            transcript, start = Transcript(0, prompt), time.perf_counter()
            for event in engine.stream(prompt_ids, params):
                transcript.add(event)
            times.append(time.perf_counter() - start)
            output = transcript.output
            if output is None or output.error is not None:
                raise ValueError(output.error if output else "a run has no output")
            outputs.append(output)
            texts.append(coloured(transcript.pieces))
    plain_seconds, speculative_seconds = map(statistics.median, seconds)
    return Comparison(prompt, outputs[0], outputs[1], texts, plain_seconds, speculative_seconds)


def _show(console: Console, comparisons: list[Comparison], spec: SpecConfig) -> None:
    import torch

    method, count = method_named(spec.method), spec.num_model_tokens()
    is_fixed = method.writes_chains and spec.confidence_threshold is None
    proposal = f"{'' if is_fixed else 'up to '}{counted(count, 'token')}"
    if spec.drafts_trees or spec.cape:
        proposal = f"a tree, {counted(count, 'token')} deep,"
    if spec.suffix_tokens is not None:
        proposal += f" or copies up to {spec.suffix_tokens}"
    console.print(
        f"Each step {method.writer} proposes {proposal} and the target"
        f" checks them in one pass. One prompt at a time, CPU threads: {torch.get_num_threads()}."
    )
    for index, comparison in enumerate(comparisons):
        console.print(Rule(f"prompt {index + 1} of {len(comparisons)}", style="dim"))
        console.print(Text(comparison.prompt, style="dim"))
        table = Table(expand=True, show_edge=False, pad_edge=False)
        for name in ("plain", "speculative"):
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*comparison.texts)
        console.print(table)
    console.print(Rule(style="dim"))
    sources = [s for c in comparisons for s in c.speculative.sources]
    console.print(Group(legend(sources), Text()))
    console.print(_speeds(comparisons))


def _speeds(comparisons: list[Comparison]) -> Table:
    from fastspec.engine.stats import SpecStats

    names = ("prompt", "tokens", "plain tokens/s", "speculative tokens/s", "ratio")
    table = table_of(*names, "acceptance rate", "mean acceptance length")
    rows = [(str(index + 1), [c]) for index, c in enumerate(comparisons)]
    for name, members in [*rows, ("all", comparisons)]:
        num_plain = sum(len(c.plain.token_ids) for c in members)
        stats = SpecStats.total(c.speculative.stats for c in members)
        plain_speed = num_plain / sum(c.plain_seconds for c in members)
        speed = stats.num_output_tokens / sum(c.speculative_seconds for c in members)
        cells = [number(plain_speed, 1), number(speed, 1), f"{speed / plain_speed:.2f}x"]
        cells += [number(stats.acceptance_rate), number(stats.mean_acceptance_length)]
        style = "bold" if name == "all" else None
        table.add_row(name, str(stats.num_output_tokens), *cells, style=style)
    return table


def _conclude(console: Console, comparisons: list[Comparison], temperature: float) -> bool:
    """Say whether both outputs are equal, by their ids; False when they should be and are not."""
    console.print()
    if temperature > 0:
        console.print(
            f"At temperature {temperature:g} both outputs are draws from one distribution."
        )
        return True
    for index, comparison in enumerate(comparisons):
        plain, speculative = comparison.plain, comparison.speculative
        if plain.token_ids != speculative.token_ids:
            pairs = enumerate(zip(plain.token_ids, speculative.token_ids, strict=False))
            place = next((n for n, (one, other) in pairs if one != other), "the shorter one's end")
            console.print(
                f"The outputs of prompt {index + 1} DIFFER at token {place}.", style="red"
            )
            return False
    num_tokens = sum(len(comparison.plain.token_ids) for comparison in comparisons)
    console.print(
        f"Both outputs are identical: {counted(num_tokens, 'token id')} compared.",
        style="bold green",
    )
    return True
