"""`fastspec batch`: answer a file of prompts, in one or several processes."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.display import counted, progress_bar
from fastspec.cli.errors import begin, report, usage_errors
from fastspec.cli.options import Config, Flags, command, output_file
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import require_file, require_regular
from fastspec.tools.settings import Models


@command
def batch(
    models: Annotated[Models, Flags()],
    params: Annotated[SamplingParams, Flags(without=("logprobs", "prompt_logprobs"))],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags()],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE.jsonl",
            help='JSON lines, each an object with "prompt" or "messages" and optionally its own'
            ' options such as "temperature" or "max_tokens"; other fields are kept, except those of'
            " requests to a server that cannot be set in a row.",
        ),
    ],
    output_file: Annotated[
        Path,
        output_file(
            "File for the same objects with their answers; an interrupted run continues from"
            " FILE.jsonl.part.",
            "FILE.jsonl",
            "--output",
        ),
    ],
    replicas: Annotated[
        int, typer.Option(min=1, max=256, help="Number of processes, each with its own engine.")
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Address of a Ray cluster to run on: auto on a machine of the cluster,"
            " ray://HOST:10001 from elsewhere, local to start one here; --replicas is then the"
            " number of actors.",
        ),
    ] = None,
    config_file: Config = None,
) -> None:
    """Answer every prompt of a file, in order.

    After an interruption, rerun the same command to continue.
    """
    models.check(spec.method)
    require_file("input_file", input_file)
    require_regular("output_file", output_file)
    begin()
    from fastspec.tools.batch import BatchJob, in_launched, launched, run_batch, work_for_first

    rank, size = launched()
    elsewhere = in_launched if size > 1 else None
    with usage_errors():
        if size > 1 and (replicas > 1 or ray_address is not None):
            raise ValueError("replicas, ray_address: the launcher has already started processes")
        if ray_address is not None:
            try:
                from fastspec.serve.on_ray import answers
            except ImportError as error:
                raise ValueError(f"ray_address: {error}") from error
            elsewhere = partial(answers, ray_address, replicas)
    job = BatchJob(models, params, spec, config)
    if rank > 0:
        return work_for_first(job)
    with progress_bar("prompts") as bar:
        task = bar.add_task("answering")
        num_failed = run_batch(
            job,
            input_file,
            output_file,
            replicas,
            lambda done, total: bar.update(task, completed=done, total=total),
            elsewhere,
        )
    typer.echo(str(output_file))
    if num_failed:
        report(f'{counted(num_failed, "prompt")} failed; see the field "error"')
        raise typer.Exit(1)
