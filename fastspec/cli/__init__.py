"""The command line: `fastspec generate`, `bench`, `tune` and the others."""

from typing import Annotated

import typer
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

import fastspec
from fastspec.cli import bench, demo, generate, info, simulate, train, tune
from fastspec.cli.errors import OneLineErrors

app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False)
app.command()(generate.generate)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(simulate.simulate)
app.command()(info.info)
app.add_typer(train.app, name="train")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Faster generation from Hugging Face language models, with the same output."""
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if version:
        typer.echo(fastspec.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


__all__ = ["app"]
