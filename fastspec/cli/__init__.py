"""The command line: `fastspec generate`, `bench`, `tune` and the others.

The modules of commands import nothing that imports torch, so help and errors in options appear at
once. Commands import what needs a model after their options are checked.
"""

from typing import Annotated

import typer

import fastspec
from fastspec.cli import (
    batch,
    bench,
    chat,
    demo,
    fetch,
    generate,
    info,
    serve,
    simulate,
    train,
    tune,
)
from fastspec.cli.errors import OneLineErrors
from fastspec.cli.help import SectionedHelp

app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    generate.generate,
    batch.batch,
    demo.demo,
    bench.bench,
    tune.tune,
    serve.serve,
    chat.chat,
    simulate.simulate,
    fetch.fetch,
    info.info,
):
    app.command(cls=SectionedHelp)(command)
app.add_typer(train.app, name="train")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Faster generation from Hugging Face language models, with the same output."""
    if version:
        typer.echo(fastspec.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


__all__ = ["app"]
