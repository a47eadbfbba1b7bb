"""`fastspec generate`: continue prompts."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli import options
from fastspec.cli.display import number, progress_bar
from fastspec.cli.errors import check_can_write, note, report, usage_errors
from fastspec.cli.printers import JsonPrinter, TextPrinter
from fastspec.cli.prompts import check_no_dataset, collect_prompts, named_prompts
from fastspec.cli.running import Transcript, run_prompts
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import write_whole
from fastspec.config.methods import method_named
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.request_factory import Prompt
from fastspec.tools.stored_outputs import stored_record


def generate(
    target: options.Target = "tiny",
    draft: options.Draft = None,
    config_file: options.Config = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt a line, or .jsonl objects with "text" or "prompt"; - is stdin, which'
            " is also read when no prompt is given.",
        ),
    ] = None,
    dataset: options.Dataset = None,
    dataset_file: options.DatasetFile = None,
    num_prompts: options.DatasetPrompts = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy, above 0 logits are divided by it.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k best tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the best tokens of this total mass; 1 is off.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens below this fraction of the best's probability; 0 is off."),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes samples repeatable; without it each run differs.")
    ] = None,
    max_tokens: options.MaxTokens = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; may be given several times."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            help="auto (a draft model if there is one), none, draft_model, glide, prompt_lookup,"
            " mag, ngram, cascade (a draft model and MaG) or tree (of a draft model's tokens)."
        ),
    ] = "auto",
    prompt_lookup_min: options.PromptLookupMin = None,
    prompt_lookup_max: options.PromptLookupMax = None,
    bigram: options.Bigram = None,
    ngram_size: options.NgramSize = None,
    filler_top_k: options.FillerTopK = None,
    k_matrix: options.KMatrix = None,
    lenience: options.Lenience = 1.0,
    tree_width: options.TreeWidth = None,
    tree_nodes: options.TreeNodes = None,
    cape: options.Cape = False,
    cape_bins: options.CapeBins = None,
    draft_sample_method: Annotated[
        str | None,
        typer.Option(
            help="How a draft model chooses: probabilistic, the default, or greedy; both are exact."
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="constant, or adaptive: as many draft tokens as pay off, even none."),
    ] = "constant",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_batch_size: Annotated[int, typer.Option(help="Prompts decoded together at most.")] = 32,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="Read a beginning that prompts share once.")
    ] = False,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Wrap each prompt in the tokenizer's chat template."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt, nothing else.")
    ] = False,
    show_sources: Annotated[
        bool, typer.Option("--show-sources", help="Colour the text by who wrote each token.")
    ] = False,
    show_tree: Annotated[
        bool,
        typer.Option("--show-tree", help="Draw the token tree of each step after the text."),
    ] = False,
    save_outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write ids that fastspec simulate reads."),
    ] = None,
) -> None:
    """Continue prompts, speculatively when there is a draft model; by default greedily."""
    if as_json and show_sources:
        raise typer.BadParameter("--show-sources: the JSON of --json holds the sources already")
    if show_tree and (as_json or (method != "tree" and not cape)):
        raise typer.BadParameter("--show-tree: needs --method tree or --cape, and no --json")
    if save_outputs is not None:
        _check_saving(save_outputs, temperature, seed)
    if method == "none" and schedule != "constant":
        raise typer.BadParameter("--schedule: --method none proposes nothing to schedule")
    with usage_errors():
        takes_draft = method == "auto" or method_named(method).needs_draft
    if not takes_draft and draft is not None:
        raise typer.BadParameter(f"--draft: --method {method} uses no draft model")
    with usage_errors():
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
        )
        spec = SpecConfig(
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method=draft_sample_method,
            schedule=schedule,
            prompt_lookup_min=prompt_lookup_min,
            prompt_lookup_max=prompt_lookup_max,
            bigram_path=bigram,
            ngram_size=ngram_size,
            filler_top_k=filler_top_k,
            k_matrix=options.k_matrix_of(k_matrix),
            lenience=lenience,
            tree_width=tree_width,
            tree_nodes=tree_nodes,
            cape=cape,
            cape_bins=options.cape_bins_of(cape_bins),
        )
        config = EngineConfig(
            dtype=dtype,
            device=device,
            max_batch_size=max_batch_size,
            prefix_caching=prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
        )
    if dataset is None:
        check_no_dataset(dataset_file, num_prompts)
        texts = collect_prompts(prompt or [], prompts_file)
    else:
        named = named_prompts(dataset, dataset_file, prompts_file, num_prompts)
        texts = [*(prompt or []), *(named or [])]
    engine = Engine(target, options.drafts_of(draft, method), spec=spec, config=config)
    if method == "auto" and not engine.is_speculative:
        note("no --draft, so this is plain decoding")
    prompts = [_chat_ids(engine, text) for text in texts] if chat else texts
    streams = len(texts) == 1 and not as_json and sys.stdout.isatty()
    shown = _token_text(engine) if show_tree else None
    printer = JsonPrinter() if as_json else TextPrinter(len(texts), show_sources, streams, shown)
    start = time.perf_counter()
    outputs = _run(engine, prompts, texts, params, max_tokens, printer)
    if save_outputs is not None:
        limit = engine.max_model_len
        records = (stored_record(o, params, limit) for o in outputs if o.error is None)
        write_whole("".join(json.dumps(record) + "\n" for record in records), save_outputs)
    if sys.stderr.isatty():
        typer.echo(_summary(engine, time.perf_counter() - start), err=True)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _check_saving(file: Path, temperature: float, seed: int | None) -> None:
    check_can_write("--save-outputs", file)
    if file.suffix != ".jsonl":
        raise typer.BadParameter(f"--save-outputs: expected a .jsonl file, got {str(file)!r}")
    if temperature > 0 and seed is None:
        raise typer.BadParameter("--save-outputs: a sampled run needs a --seed to be simulated")


def _run(
    engine: Engine,
    prompts: Sequence[Prompt],
    texts: list[str],
    params: SamplingParams,
    max_tokens: int,
    printer: JsonPrinter | TextPrinter,
) -> list[RequestOutput]:
    """Run all prompts, printing each in its turn."""
    transcripts = [Transcript(index, text) for index, text in enumerate(texts)]
    num_printed = 0
    with progress_bar("tokens", live=not printer.streams) as bar:
        task = bar.add_task("generating", total=len(texts) * max_tokens)
        for index, event in run_prompts(engine, prompts, params):
            transcripts[index].add(event)
            bar.advance(task, len(event.token_ids))
            printer.piece(transcripts[index], event.text)
            if event.output is None:
                continue
            bar.advance(task, max_tokens - len(event.output.token_ids))
            bar.stop()  # stdout may be the same terminal
            for transcript in transcripts[num_printed:]:
                if transcript.output is None:
                    break
                printer.finish(transcript, transcript.output)
                num_printed += 1
            if event.output.error is not None:
                report(f"prompt {index + 1}: {event.output.error}")
            bar.start()
    return [transcript.output for transcript in transcripts if transcript.output is not None]


def _chat_ids(engine: Engine, text: str) -> list[int]:
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise typer.BadParameter("--chat: the target's tokenizer has no chat template")
    messages = [{"role": "user", "content": text}]
    wrapped = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(str(wrapped), add_special_tokens=False)["input_ids"]


def _token_text(engine: Engine) -> Callable[[int], str]:
    """How one token is shown: on one line, spaces and all."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise typer.BadParameter("--show-tree: the target has no tokenizer")
    return lambda token_id: repr(tokenizer.decode([token_id]))


def _summary(engine: Engine, seconds: float) -> str:
    stats = engine.stats
    speed = f"{stats.num_output_tokens} tokens in {seconds:.2f} s"
    if stats.acceptance_rate is None:
        return f"{speed}, nothing was proposed"
    length = number(stats.mean_acceptance_length)
    return f"{speed}, acceptance rate {stats.acceptance_rate:.2f}, {length} tokens per target pass"
