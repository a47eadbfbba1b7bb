"""`fastspec train eagle3`: an EAGLE-3 draft for a target of your own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fastspec.cli import options
from fastspec.cli.display import progress_bar
from fastspec.cli.errors import check_can_write, quiet_libraries, usage_errors
from fastspec.cli.options import Flags, with_flags
from fastspec.cli.train_draft import Data, Out, Plot, Resume, Steps, check_files
from fastspec.config import EngineConfig
from fastspec.config.checks import is_int
from fastspec.config.files import parse_json_lines, read_text
from fastspec.train.options import DraftShape, TrainOptions

_FIXED = ("steps", "lookup_rows", "distillation", "store_target")


@with_flags
def eagle3(
    shape: Annotated[DraftShape, Flags(without=("layers", "hidden_size"))],
    settings: Annotated[TrainOptions, Flags(without=_FIXED, steps=1, optimizer="muon", rate=2e-3)],
    config: Annotated[EngineConfig, Flags("dtype", "device", dtype="bfloat16")],
    data: Data,
    out: Out,
    target: options.Target = "tiny",
    steps: Steps = None,
    resume: Resume = False,
    plot: Plot = None,
) -> None:
    """Train an EAGLE-3 draft, which reads hidden states of the target; that stays as it is.

    The target reads all texts once, and its states are kept on disk meanwhile. Lines of .jsonl hold
    a "text", or "prompt_ids" and the "token_ids" that the target has written after them, which
    alone are learnt then. At the end it is reported what of a draft is accepted on held-out text.
    """
    check_files(data, out)
    check_can_write("--plot", plot)
    from fastspec.tools.plots import plot_loss, require_plotting

    with usage_errors():
        if plot is not None:
            require_plotting()
    quiet_libraries()
    import torch

    from fastspec.models.loading import load_model, load_tokenizer
    from fastspec.train.eagle3 import cut_texts, make_eagle3, split_texts, train_eagle3

    tokenizer = load_tokenizer("target", target)
    model = load_model("target", target, config)
    if model.config.is_encoder_decoder:
        raise ValueError(f"target: expected a decoder, got {type(model).__name__}")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    texts = cut_texts(_documents(data, tokenizer, vocab_size), shape.context)
    torch.manual_seed(settings.seed)
    with usage_errors():
        training, judging = split_texts(texts, shape.held_out, settings.seed)
        fresh = make_eagle3(model, training, shape)
        num_steps = -(-len(training) // settings.batch_size) if steps is None else steps
        settings = replace(settings, steps=num_steps)
    with progress_bar("steps") as bar:
        task = bar.add_task("training", total=settings.steps)

        def advance(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.3f}")

        def on_text(done: int) -> None:
            bar.update(task, description=f"target: text {done} of {len(texts)}")

        record = train_eagle3(
            model, fresh, training, judging, settings, out, resume, advance, on_text
        )
    if plot is not None:
        plot_loss(record["losses"], plot)
    accepted = ", ".join(f"{part:.2f}" for part in record["greedy_acceptance"])
    typer.echo(
        f"{out}: {record['steps']} steps, loss {record['train_loss']:.3f}; on held-out text the"
        f" target takes of each draft token, if those before it were taken: {accepted}"
    )


def _documents(
    files: list[Path], tokenizer: Any, vocab_size: int
) -> Iterator[tuple[list[int], int]]:
    """Token ids of each text, and where what is learnt of it begins."""

    def are_ids(value: Any) -> bool:
        return isinstance(value, list) and all(is_int(i) and 0 <= i < vocab_size for i in value)

    for file in files:
        content = read_text("data", file)
        if file.suffix != ".jsonl":
            yield tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"], 1
            continue
        for where, record in parse_json_lines(content, f"data: {file}"):
            fields = record if isinstance(record, dict) else {}
            if isinstance(fields.get("text"), str):
                ids = tokenizer(fields["text"], add_special_tokens=False, verbose=False)
                yield ids["input_ids"], 1
                continue
            for name in ("prompt_ids", "token_ids"):
                if not are_ids(fields.get(name)):
                    given = f"{name} is {fields.get(name)!r:.40}"
                    raise ValueError(f'{where}: expected "text", or lists of ids; {given}')
            yield [*fields["prompt_ids"], *fields["token_ids"]], len(fields["prompt_ids"])
