"""`fastspec batch`: answer a file of prompts, by several processes if there is room."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.display import progress_bar
from fastspec.cli.errors import begin, report, usage_errors
from fastspec.cli.options import Config, Flags, command, output_file
from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.files import require_file
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
            help='JSON lines, each an object with "prompt" or "messages", and perhaps options of'
            ' its own such as "temperature" or "max_tokens"; the rest is kept.',
        ),
    ],
    output_file: Annotated[
        Path,
        output_file(
            "The same objects with their answers; a run that was cut off goes on from"
            " FILE.jsonl.part.",
            "FILE.jsonl",
            "--output",
        ),
    ],
    replicas: Annotated[
        int, typer.Option(min=1, max=256, help="Processes, each with an engine of its own.")
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Address of a Ray cluster to run on: auto on a machine of the cluster,"
            " ray://HOST:10001 from elsewhere, local to start one here; --replicas is the number of"
            " actors.",
        ),
    ] = None,
    config_file: Config = None,
) -> None:
    """Answer every prompt of a file, in order.

    After an interruption, run the same command again to continue.
    """
    models.check(spec.method)
    require_file("input_file", input_file)
    begin()
    from fastspec.tools.batch import BatchJob, in_launched, launched, run_batch, work_for_first

    rank, size = launched()
    elsewhere = in_launched if size > 1 else None
    with usage_errors():
        if size > 1 and (replicas > 1 or ray_address is not None):
            raise ValueError("replicas, ray_address: the launcher has started processes already")
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
        report(f"{num_failed} prompts failed; their error says why")
        raise typer.Exit(1)
