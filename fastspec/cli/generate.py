"""`fastspec generate`: continue prompts."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.display import counted, is_terminal, number
from fastspec.cli.errors import begin, note
from fastspec.cli.options import AsJson, Config, Flags, command, output_file
from fastspec.cli.prompts import PromptOptions, tokenize_prompts, typed_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import refuse
from fastspec.config.files import write_whole, writing
from fastspec.config.methods import method_named
from fastspec.tools.settings import Models

# Of SamplingParams, what changes logits: drafts are made with it, but not those of a simulation.
_LOGIT_RULES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "min_tokens"),
)


@command
def generate(
    models: Annotated[Models, Flags()],
    params: Annotated[SamplingParams, Flags()],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags()],
    prompts: Annotated[PromptOptions, Flags(shown={"num_prompts": "all"})],
    config_file: Config = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to continue; may be given several times."),
    ] = None,
    as_json: AsJson = False,
    show_sources: Annotated[
        bool, typer.Option("--show-sources", help="Colour the text by who wrote each token.")
    ] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw the token tree of each step after the text.")
    ] = False,
    save_outputs: Annotated[
        Path | None, output_file("Write token ids for fastspec simulate.", "FILE.jsonl")
    ] = None,
) -> None:
    """Continue prompts, with speculation if there is a draft model.

    Without a prompt option, each line of stdin is a prompt.
    """
    if as_json:
        refuse("show_sources", show_sources or None, "--json already includes the sources")
    else:
        refuse("logprobs", params.logprobs, "only with --json")
        refuse("prompt_logprobs", params.prompt_logprobs, "only with --json")
    if prompts.chat:
        refuse("prompt_template", config.prompt_template, "not with --chat and its template")
    if show_tree and (as_json or not (spec.drafts_trees or spec.cape)):
        needed = "token trees (--method tree, --tree-nodes or --cape)"
        raise ValueError(f"show_tree: needs {needed}, and not --json")
    if save_outputs is not None:
        _check_stored(save_outputs, params, spec)
    models.check(spec.method)
    prompts.check_template(models)
    texts = typed_prompts(prompt or [], prompts)
    begin()
    from fastspec.cli.printers import JsonPrinter, TextPrinter, run_and_print
    from fastspec.tools.stored_outputs import drafting_of, stored_record

    engine = models.engine(spec, config)
    if method_named(spec.method).chooses and not engine.is_speculative:
        note("no --draft, so this is plain decoding")
    if show_tree and engine.tokenizer is None:
        raise ValueError("show_tree: the target has no tokenizer")
    given = tokenize_prompts(engine.tokenizer, texts, True) if prompts.chat else texts
    streams = len(texts) == 1 and not as_json and is_terminal(sys.stdout)
    trees = engine.tokenizer if show_tree else None
    printer = JsonPrinter() if as_json else TextPrinter(len(texts), show_sources, streams, trees)
    start = time.perf_counter()
    outputs = run_and_print(engine, given, texts, params, printer)
    seconds, stats = time.perf_counter() - start, engine.stats
    if save_outputs is not None:
        method, drafter = engine.spec.method, engine.drafter
        if method_named(method).chooses:
            method = "none" if drafter is None else drafter.name
        drafting = drafting_of(engine.spec, method, engine.drafters[None])
        of_run = params, engine.max_model_len, drafting, engine.decoder_start_id, models.target
        records = (stored_record(o, *of_run) for o in outputs if o.error is None)
        with writing("save_outputs", save_outputs):
            write_whole("".join(json.dumps(record) + "\n" for record in records), save_outputs)
    if is_terminal(sys.stderr):
        told = f"{counted(stats.num_output_tokens, 'token')} in {seconds:.2f} s, "
        if stats.acceptance_rate is None:
            told += "nothing was proposed"
        else:
            length = number(stats.mean_acceptance_length)
            told += f"acceptance rate {stats.acceptance_rate:.2f}, {length} tokens per target pass"
        typer.echo(told, err=True)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _check_stored(file: Path, params: SamplingParams, spec: SpecConfig) -> None:
    """Refuse a run whose counts a simulation of its outputs would not reproduce."""
    if file.suffix != ".jsonl":
        raise ValueError(f"save_outputs: expected a .jsonl file, got {str(file)!r}")
    if params.temperature > 0 and params.seed is None:
        raise ValueError("save_outputs: a sampled run needs a --seed to be simulated")
    why = "not with --save-outputs, as simulate does not apply it"
    for name in _LOGIT_RULES:
        if not params.is_default(name):
            refuse(name, getattr(params, name), why)
    if params.temperature > 0 and spec.rejection_sample_method == "coupled":
        raise ValueError("save_outputs: a sampled run with coupled verification is not simulated")
    if spec.is_lossy:
        raise ValueError("save_outputs: relaxed and synthetic acceptance are not simulated")
