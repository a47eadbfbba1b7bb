"""`fastspec train`: what drafters learn from your own text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli import options, train_draft, train_eagle3
from fastspec.cli.display import progress_bar
from fastspec.cli.errors import check_can_write, quiet_libraries, usage_errors
from fastspec.cli.options import Flags, with_flags
from fastspec.cli.prompts import read_prompts
from fastspec.config import EngineConfig
from fastspec.config.files import read_text

app = typer.Typer(help="Make what drafters need from text of your own.", no_args_is_help=True)
app.command()(train_draft.draft)
app.command()(train_draft.glide)
app.command()(train_eagle3.eagle3)


@app.command()
def bigram(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text files.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the table goes, as JSON.")],
    target: options.Target = "tiny",
) -> None:
    """Count which token follows which, and write the table that --method mag reads."""
    for file in files:
        if not file.is_file():
            raise typer.BadParameter(f"FILE: no such file: {str(file)!r}")
    check_can_write("--out", out)
    quiet_libraries()
    import numpy as np

    from fastspec.drafters.bigram_table import save_bigram
    from fastspec.models.loading import load_tokenizer
    from fastspec.train.bigram import count_bigrams

    tokenizer = load_tokenizer("target", target)
    with progress_bar("files") as bar:
        task = bar.add_task("counting", total=len(files))

        def documents() -> Iterator[np.ndarray]:
            for file in files:
                text = read_text("FILE", file)
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                yield np.array(ids, dtype=np.int64)
                bar.advance(task)

        save_bigram(count_bigrams(documents(), len(tokenizer)), out)
    typer.echo(f"{out}: {len(tokenizer)} entries")


@app.command()
@with_flags
def texts(
    config: Annotated[EngineConfig, Flags("dtype", "device", "max_batch_size")],
    prompts_file: Annotated[
        Path, typer.Option(metavar="FILE", help="Prompts, read as generate does.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where the texts go.")],
    target: options.Target = "tiny",
    max_tokens: options.MaxTokens = 192,
) -> None:
    """Let a chat model answer prompts, for train draft and train glide to learn from.

    A run that was stopped goes on where it stopped.
    """
    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"--out: expected a .jsonl file, got {str(out)!r}")
    check_can_write("--out", out)
    prompts = read_prompts(prompts_file)
    quiet_libraries()
    from fastspec.engine.engine import Engine
    from fastspec.train.own_text import write_texts

    engine = Engine(target, config=config)
    with progress_bar("texts") as bar:
        task = bar.add_task("writing", total=len(prompts))
        with usage_errors():
            write_texts(
                engine, prompts, max_tokens, out, lambda done: bar.update(task, completed=done)
            )
    typer.echo(f"{out}: {len(prompts)} texts")
