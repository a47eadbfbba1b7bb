"""Engines on a Ray cluster: replicas of the server behind Ray Serve, a file's rows by Ray Data."""

import json
import logging
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import data, serve  # pyright: ignore[reportMissingImports]
    from ray.util.annotations import RayDeprecationWarning  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(f"{error}; pip install 'fastspec-kernels[ray]'") from error

from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.checks import is_int, require
from fastspec.config.options import Option, options_of
from fastspec.config.serve import ENGINE_DEFAULTS, ServeConfig
from fastspec.models.named import shown_name
from fastspec.serve.loading import Choices
from fastspec.tools.batch import Answers, BatchJob, Row, in_this_process
from fastspec.tools.settings import Models

_LIVES = 3  # times that an actor is started again after it was killed
_BLOCKS = 4  # of rows that each actor gets at least, so that none waits long for the last one
_AHEAD = 8  # rows of a block at most, in units of the batch size


def application(args: Mapping[str, Any]) -> serve.Application:
    """See `fastspec.serve.ray_app`."""
    left = dict(args)

    def given(kind: type) -> Any:
        named = options_of(kind).items()
        return {name: _read(option, left.pop(name)) for name, option in named if name in left}

    serving, spec = ServeConfig(**given(ServeConfig)), SpecConfig(**given(SpecConfig))
    config = EngineConfig(**(ENGINE_DEFAULTS | given(EngineConfig)))
    models = Models(**given(Models))
    if {"host", "port"} & {*args}:
        raise ValueError("host, port: set them in Ray Serve, which does the listening")
    served = Choices(**given(Choices)).engine(models, spec, config)
    replicas: Any = left.pop("num_replicas", 1)
    replicas = int(replicas) if isinstance(replicas, str) and replicas.isdecimal() else replicas
    fits = replicas == "auto" or (is_int(replicas) and replicas >= 1)
    require("num_replicas", replicas, fits, "an int >= 1 or auto")
    if left:
        raise ValueError(f"{', '.join(map(str, left))}: ray_app has no such argument")

    def new_app() -> Any:
        from fastspec.serve.app import create_app

        return create_app(served.load(), serving, shown_name(models.target))

    replica = serve.deployment(
        serve.ingress(new_app)(),
        name="fastspec",
        num_replicas=replicas,
        ray_actor_options=_resources(config, models.threads),
        max_ongoing_requests=serving.max_requests,  # Ray's default would keep batches at 5
        graceful_shutdown_timeout_s=serving.drain_timeout,
    )
    return replica.bind()


def _read(option: Option, value: Any) -> Any:
    """The value of an option; `serve run` passes only strings, so others are JSON in them."""
    if not isinstance(value, str) or option.kind.flag_type in (str, Path):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # which the config refuses, by the option's name


def _resources(config: EngineConfig, threads: int | None) -> dict[str, float]:
    """Resources of one engine: Ray hides every GPU that a process has not requested."""
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    gpus = 1 if has_gpus and config.device != "cpu" else 0
    return {"num_cpus": threads or 1, "num_gpus": gpus}


def answers(address: str, replicas: int, job: BatchJob, left: deque[Row]) -> Answers:
    """Answers from Ray Data actors, as blocks of rows are finished.

    Ray restarts an actor that was killed, and repeats its block.

    Args:
        address: of the cluster; "local" starts one on this machine for the duration of the run.
    Raises:
        ValueError: the cluster cannot be reached, the models cannot be loaded, or Ray gave up.
    """
    if not left:
        return
    texts = [json.dumps(row) for row in left]  # prompts and conversations in one column
    share = len(texts) // (replicas * _BLOCKS)
    size = max(1, min(_AHEAD * job.config.max_batch_size, share))
    num_blocks = -(-len(texts) // size)
    with _cluster(address), warnings.catch_warnings():
        # Without limits an actor that dies of its rows or its model would be started for ever. Ray
        # takes them as options of the actor, which it wants to replace by others it does not have.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data.DataContext.get_current().enable_progress_bars = False
        rows = data.from_items(texts, override_num_blocks=num_blocks).map_batches(
            _Actor,
            fn_constructor_args=(job,),
            batch_size=size,
            compute=data.ActorPoolStrategy(size=min(replicas, num_blocks)),
            max_restarts=_LIVES,
            max_task_retries=_LIVES,
            **_resources(job.config, job.models.threads),
        )
        for row in rows.iter_rows():
            number, answer = json.loads(row["answer"])
            if number is None:
                raise ValueError(answer)
            yield number, answer


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """The cluster of an address, unless this process has one already."""
    host, _, port = address.rpartition(":")
    begins = not ray.is_initialized()
    try:
        if host and "/" not in host:  # Ray would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        if begins:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ValueError(f"ray: cannot reach {address!r}: {error}") from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(f"ray: {error}; rerun the same command to continue") from error
    finally:
        if begins:
            ray.shutdown()


class _Actor:
    """An engine that answers blocks of rows."""

    def __init__(self, job: BatchJob):
        self._job = job
        self._engine, self._failure = None, None
        try:
            self._engine = job.engine()
        except ValueError as error:  # Ray would try again
            self._failure = str(error)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[str]]:
        left = deque(json.loads(text) for text in block["item"])
        if self._engine is None:
            return {"answer": [json.dumps((None, self._failure))]}
        made = in_this_process(self._job, left, self._engine)
        return {"answer": [json.dumps(answer) for answer in made]}
