"""Answer a file of prompts, with one engine or with several processes that have one each.

The processes are started by this one, or by `accelerate launch` or torchrun.
"""

import json
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import lru_cache, partial
from multiprocessing import AuthenticationError, get_context, resource_tracker
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from fastspec.config import EngineConfig, SamplingParams, SpecConfig
from fastspec.config.checks import is_int, require
from fastspec.config.files import json_line, parse_json_lines, read_text
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput
from fastspec.models.chat import chat_prompt_ids
from fastspec.tools.part_file import PartFile, part_file
from fastspec.tools.settings import Models

logger = logging.getLogger(__name__)

_AHEAD = 2  # rows that a process has at once, in units of its batch size
_MEETING = "fastspec batch"
_PATIENCE = timedelta(minutes=5)  # with processes that start more slowly
_ANSWER = ("text", "token_ids", "finish_reason", "error")
# A column called prediction is data, as of evaluations.
_OPTIONS = {field.name for field in fields(SamplingParams)} - {"prediction"}
_NOT_OF_ROWS = {
    *("n", "logprobs", "prompt_logprobs", "logits_processors"),
    # Fields of requests that change what a server answers.
    *("max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("echo", "best_of", "suffix", "speculation", "stream", "stream_options"),
}
Row = tuple[int, dict[str, Any]]  # its place, and what holds prompt or messages
Answers = Iterator[tuple[int, dict[str, Any]]]  # by the place of the row, as they come


def _letters(name: str) -> str:
    """What top_p and misspellings such as top_P, topP or top-p have in common."""
    return re.sub("[^a-z0-9]", "", name.lower())


_MEANT = {_letters(name): name for name in _OPTIONS | _NOT_OF_ROWS}
_CLOSE = 0.9  # similarity of max_token to max_tokens: 0.94


@lru_cache  # rows repeat their names, and a comparison with all options takes a while
def _meant(name: str) -> str:
    """The option whose name is close to that of a field; the field's own if there is none."""
    found = get_close_matches(_letters(name), _MEANT, 1, _CLOSE)
    return _MEANT[found[0]] if found else name


@dataclass(frozen=True)
class BatchJob:
    """The settings that every process needs."""

    models: Models
    params: SamplingParams
    spec: SpecConfig
    config: EngineConfig

    def engine(self) -> Engine:
        """An engine for this process, on the GPU that its launcher assigned to it."""
        if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        return self.models.engine(self.spec, self.config)


def run_batch(
    job: BatchJob,
    source: Path,
    target: Path,
    replicas: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    elsewhere: Callable[[BatchJob, deque[Row]], Answers] | None = None,
) -> int:
    """Answer every row of a file of JSON lines; returns the number of rows that failed.

    A row has a "prompt" or "messages", and optionally options of `SamplingParams` that override the
    job's; its answer is the same object with text, token_ids, finish_reason and error. Fields of
    requests to a server that a row cannot have are refused, and so are misspelt options; all others
    are kept. Answers are in the order of the rows. They are saved next to the target file as they
    arrive, so an interrupted run continues where it stopped.

    Args:
        replicas: number of processes, each with its own engine. The rows of a process that dies are
            answered by the others.
        progress: called with the number of finished rows, and of all rows.
        elsewhere: answers the rows instead of processes that this one starts.
    Raises:
        ValueError: an invalid row, a file left by another run or damaged, models that cannot be
            loaded, or every process has died.
    """
    lines = [*parse_json_lines(read_text("input", source), f"input: {source}")]
    for place, row in lines:
        _check_row(place, row, job.params)
    rows = [row for _, row in lines]
    fits = partial(_is_kept, num_rows=len(rows))
    run = _what_decides(job, rows)
    with part_file("output", target, "fastspec_batch", run, fits) as part:
        answers = _Answers(rows, part)
        left = deque((n, row) for n, row in enumerate(rows) if n not in answers.known)
        progress(len(answers.known), len(rows))
        if elsewhere is None:
            elsewhere = in_this_process if replicas == 1 else partial(_in_processes, replicas)
        for number, answer in elsewhere(job, left):
            answers.keep(number, answer)
            progress(len(answers.known), len(rows))
        return answers.finish()


class _Answers:
    """The answers so far, by the place of their row, in a file that a later run reads."""

    def __init__(self, rows: list[dict[str, Any]], part: PartFile):
        self.known: dict[int, dict[str, Any]] = dict(part.kept)
        self._rows = rows
        self._part = part

    def keep(self, number: int, answer: dict[str, Any]) -> None:
        if number not in self.known:
            self.known[number] = answer
            self._part.add((number, answer))

    def finish(self) -> int:
        """Write all answers in order; returns the number of rows that failed."""
        answers = [self.known[number] for number in range(len(self._rows))]
        pairs = zip(self._rows, answers, strict=True)
        lines = [json_line(row | answer) for row, answer in pairs]
        self._part.finish("".join(line + "\n" for line in lines))
        return sum(answer["error"] is not None for answer in answers)


def _what_decides(job: BatchJob, rows: list[dict[str, Any]]) -> list[Any]:
    """All that answers depend on."""
    names = ("dtype", "prompt_template", "max_model_len", "kv_cache_dtype")
    engine = {name: getattr(job.config, name) for name in names}
    models = [job.models.target, repr(job.models.drafts(job.spec.method)), job.models.template]
    return [rows, *models, repr(job.params), repr(job.spec), repr(engine)]


def _is_kept(value: Any, num_rows: int) -> bool:
    """Whether a value is an answer with the place of its row."""
    is_pair = isinstance(value, list) and len(value) == 2
    number, answer = value if is_pair else (-1, None)
    is_answer = isinstance(answer, dict) and answer.keys() == {*_ANSWER}
    return is_answer and is_int(number) and 0 <= number < num_rows


def _check_row(place: str, row: Any, params: SamplingParams) -> None:
    fits = isinstance(row, dict) and ("prompt" in row) != ("messages" in row)
    require(place, row, fits, "an object with prompt or messages")
    for name in _ANSWER:
        if name in row:
            raise ValueError(f"{place}: {name}: reserved for the answer; rename this field")
    for name in row:
        if name != (meant := _meant(name)):
            raise ValueError(f"{place}: {name}: expected {meant}; rename this field if not meant")
        if name in _NOT_OF_ROWS:
            raise ValueError(f"{place}: {name}: cannot be set in a row")
    try:
        _params_of(row, params)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    for name, value in row.items():
        require(f"{place}: {name}", value, _is_finite(value), "only finite numbers")


def _is_finite(value: Any) -> bool:
    """Whether a value can be written as JSON; 1e999 is read as infinity, which cannot."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _params_of(row: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
    """The params of all rows, with the options that a row sets itself."""
    return replace(params, **{name: row[name] for name in row.keys() & _OPTIONS})


def in_this_process(job: BatchJob, left: deque[Row], engine: Engine | None = None) -> Answers:
    """Answers from an engine, by default a new one."""

    def take(room: int, waits: bool) -> list[Row]:
        return [left.popleft() for _ in range(min(room, len(left)))]

    if left:
        yield from _answered(engine or job.engine(), job, take)


def _answered(engine: Engine, job: BatchJob, take: Callable[[int, bool], list[Row]]) -> Answers:
    """Answers as they arrive, until there are no more rows to take.

    Args:
        take: returns up to the given number of rows; the flag says whether to wait for some.
    """
    numbers: dict[str, int] = {}
    most = _AHEAD * engine.config.max_batch_size
    while (rows := take(most - len(numbers), not numbers)) or numbers:
        for number, row in rows:
            try:
                if "messages" in row:
                    options = {"add_generation_prompt": True}
                    messages = row["messages"]
                    require("messages", messages, isinstance(messages, list), "a list of objects")
                    prompt = chat_prompt_ids(engine.tokenizer, messages, **options)
                else:
                    prompt = row["prompt"]
                    require("prompt", prompt, isinstance(prompt, (str, list)), "a string")
                params = _params_of(row, job.params)
                numbers[engine.add_request(prompt, params)] = number
            except ValueError as error:
                yield number, _answer(None, str(error))
        for error in engine.take_drafter_errors():
            logger.warning("a drafter failed: %s: %s", type(error).__name__, error)
        for event in engine.step() if numbers else ():
            if event.output is not None:
                yield numbers.pop(event.request_id), _answer(event.output, event.output.error)


def _answer(output: RequestOutput | None, error: str | None) -> dict[str, Any]:
    given = ("", [], "error")
    if output is not None:
        given = (output.text, list(output.token_ids), output.finish_reason)
    return dict(zip(_ANSWER, (*given, error), strict=True))


def _in_processes(replicas: int, job: BatchJob, left: deque[Row]) -> Answers:
    """Answers from several processes that this one starts."""
    with ExitStack() as stack:
        started = [stack.enter_context(process(job)) for _ in range(min(replicas, len(left)))]
        yield from handed_out(job, left, started)


def handed_out(job: BatchJob, left: deque[Row], workers: list[Connection]) -> Answers:
    """Answers from processes that `work`, as they arrive; each is given rows as it has room."""
    ahead = _AHEAD * job.config.max_batch_size
    taken: dict[Connection, dict[int, Any]] = {connection: {} for connection in workers}
    while left or any(taken.values()):
        share = max(1, -(-len(left) // max(1, len(taken))))
        for connection in [*taken]:
            mine = taken[connection]
            num = min(ahead - len(mine), share, len(left))
            rows = [left.popleft() for _ in range(max(num, 0))]
            mine |= dict(rows)
            if rows and not _sent(connection, rows):
                left.extendleft(taken.pop(connection).items())
        if not taken:
            raise ValueError("batch: every process has died; rerun the same command to continue")
        for connection in wait([*taken]):
            assert isinstance(connection, Connection)
            try:
                number, answer = connection.recv()
            except (EOFError, OSError):  # it has died: the others do what it had
                left.extendleft(taken.pop(connection).items())
                continue
            if number is None:
                raise ValueError(answer)
            del taken[connection][number]
            yield number, answer
    for connection in taken:
        _sent(connection, [])


def _sent(connection: Connection, rows: list[Row]) -> bool:
    try:
        connection.send(rows)
    except OSError:
        return False
    return True


@contextmanager
def process(job: BatchJob) -> Iterator[Connection]:
    """A process that answers the rows sent to it, for the duration of the block."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work_quietly, args=(there, job), daemon=True)
    resource_tracker.ensure_running()  # which lets interrupts through where it is started
    # Ctrl-C reaches all processes of a terminal: this one ends those that it has started.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.terminate()
        process.join()


def _work_quietly(connection: Connection, job: BatchJob) -> None:
    """`work` in a process that may be ended at any time: no bars, and no lock of theirs to leak."""
    tqdm.set_lock(RLock())
    transformers_logging.disable_progress_bar()
    work(connection, job)


def work(connection: Connection, job: BatchJob) -> None:
    """Answer the rows that are sent, until an empty list is sent."""
    try:
        engine = job.engine()
    except ValueError as error:
        with suppress(ConnectionError):
            connection.send((None, str(error)))
        return

    inbox: SimpleQueue[list[Row]] = SimpleQueue()

    def read() -> None:  # always, so that neither side waits for the other to read
        with suppress(EOFError, OSError):
            while rows := connection.recv():
                inbox.put(rows)
            return inbox.put([])
        os._exit(1)  # whoever asked has gone, perhaps killed, and an engine may be at work

    def take(room: int, waits: bool) -> list[Row]:
        rows = inbox.get() if waits else []
        while not inbox.empty():
            rows += inbox.get()
        return rows

    Thread(target=read, daemon=True).start()
    with suppress(ConnectionError):  # nobody asks any more
        for answer in _answered(engine, job, take):
            connection.send(answer)


def launched() -> tuple[int, int]:
    """The rank of this process and the number of processes; (0, 1) if nothing launched it."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def in_launched(job: BatchJob, left: deque[Row]) -> Answers:
    """Answers from all launched processes, for the first one, which starts its own worker."""
    key = os.urandom(32)
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(_listener(key))
        except OSError as error:
            raise ValueError(f"MASTER_ADDR: the first process cannot reach it: {error}") from error
        workers = [stack.enter_context(process(job))]
        others = range(1, launched()[1])
        try:
            store = _store()
            store.set(_MEETING, json.dumps((listener.address, key.hex())))
            store.wait([f"{_MEETING} {rank}" for rank in others], _PATIENCE)
        except RuntimeError as error:
            raise ValueError(f"WORLD_SIZE: not all processes have joined: {error}") from error
        workers += [stack.enter_context(_accepted(listener)) for _ in others]
        yield from handed_out(job, left, workers)


def work_for_first(job: BatchJob) -> None:
    """Answer the rows that the first process hands out, in every other process."""
    try:
        store = _store()
        address, key = json.loads(store.get(_MEETING))
        address = address if isinstance(address, str) else tuple(address)
        store.set(f"{_MEETING} {launched()[0]}", "")
        connection = Client(address, authkey=bytes.fromhex(key))
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"RANK: cannot reach the first process: {error}") from error
    with connection:
        work(connection, job)


def _listener(key: bytes) -> Listener:
    """Where the others reach the first process: a local socket file if all are on this machine.

    If not, it listens only on the address that leads to MASTER_ADDR.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return Listener(family="AF_UNIX", authkey=key)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # which sends nothing
        host, _ = probe.getsockname()
    return Listener((host, 0), backlog=launched()[1], authkey=key)


def _accepted(listener: Listener) -> Connection:
    while True:
        with suppress(AuthenticationError, EOFError, ConnectionError):  # somebody else's
            return listener.accept()


def _store() -> Any:
    """The Store that launched processes share; torch may be built without it."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store
