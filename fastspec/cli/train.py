"""`fastspec train`: what drafters learn from your own text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli import options, train_glide
from fastspec.cli.display import progress_bar
from fastspec.cli.errors import check_can_write, quiet_libraries
from fastspec.config.files import read_text

app = typer.Typer(help="Make what drafters need from text of your own.", no_args_is_help=True)
app.command()(train_glide.glide)


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
