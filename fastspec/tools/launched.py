"""Processes that `accelerate launch` or torchrun has started, answering one file of prompts."""

import json
import os
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from typing import Any

from fastspec.config.checks import require
from fastspec.tools.batch import Answers, BatchJob, Row, handed_out, process, work

_MEETING = "fastspec batch"
_ONE_MACHINE = "processes of one machine (--ray runs on several)"
_PATIENCE = timedelta(minutes=5)  # with processes that start more slowly


def launched() -> tuple[int, int]:
    """The rank of this process, and how many there are; (0, 1) where nothing launched it."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return 0, 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    require("WORLD_SIZE", size, size == here, _ONE_MACHINE)
    return rank, size


def in_launched(job: BatchJob, left: deque[Row]) -> Answers:
    """Answers of all launched processes, for the first one, which starts its own worker."""
    key = os.urandom(32)
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(family="AF_UNIX", authkey=key))
        workers = [stack.enter_context(process(job))]
        others = range(1, launched()[1])
        try:
            store = _store()
            store.set(_MEETING, json.dumps((listener.address, key.hex())))
            store.wait([f"{_MEETING} {rank}" for rank in others], _PATIENCE)
        except RuntimeError as error:
            raise ValueError(f"WORLD_SIZE: not all processes have come: {error}") from error
        workers += [stack.enter_context(listener.accept()) for _ in others]
        yield from handed_out(job, left, workers)


def work_for_first(job: BatchJob) -> None:
    """Answer what the first process hands out, for every other one."""
    try:
        store = _store()
        address, key = json.loads(store.get(_MEETING))
        require("WORLD_SIZE", launched()[1], os.path.exists(address), _ONE_MACHINE)
        store.set(f"{_MEETING} {launched()[0]}", "")
        connection = Client(address, authkey=bytes.fromhex(key))
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"RANK: the first process has gone: {error}") from error
    with connection:
        work(connection, job)


def _store() -> Any:
    """What launched processes share, a Store; torch may lack its part for that."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store
