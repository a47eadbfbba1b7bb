"""Processes that `accelerate launch` or torchrun has started, answering one file of prompts."""

import json
import os
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Client, Listener

from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fastspec.config.checks import require
from fastspec.tools.batch import Answers, BatchJob, Row, handed_out, process, work

_MEETING = "fastspec batch"
_PATIENCE = timedelta(minutes=5)  # with processes that start more slowly


def launched() -> tuple[int, int]:
    """The rank of this process, and how many there are; (0, 1) where nothing launched it."""
    rank, size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    require(
        "WORLD_SIZE",
        size,
        size == here,
        "processes of one machine (--ray runs on several machines)",
    )
    return rank, size


def in_launched(job: BatchJob, left: deque[Row]) -> Answers:
    """Answers of all launched processes, for the first one, which starts its own worker."""
    key = os.urandom(32)
    store = _store()
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(family="AF_UNIX", authkey=key))
        store.set(_MEETING, json.dumps((listener.address, key.hex())))
        workers = [stack.enter_context(process(job))]
        others = range(1, launched()[1])
        try:
            store.wait([f"{_MEETING} {rank}" for rank in others], _PATIENCE)
        except distributed.DistError as error:
            raise ValueError(f"WORLD_SIZE: not all processes have come: {error}") from error
        workers += [stack.enter_context(listener.accept()) for _ in others]
        yield from handed_out(job, left, workers)


def work_for_first(job: BatchJob) -> None:
    """Answer what the first process hands out, for every other one."""
    try:
        store = _store()
        address, key = json.loads(store.get(_MEETING))
        store.set(f"{_MEETING} {launched()[0]}", "")
        connection = Client(address, authkey=bytes.fromhex(key))
    except (distributed.DistError, OSError, EOFError) as error:
        raise ValueError(f"RANK: the first process has gone: {error}") from error
    with connection:
        work(connection, job)


def _store() -> Store:
    """What launched processes share."""
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store
