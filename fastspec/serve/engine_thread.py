"""Two threads, one for prompts and one that steps an engine, and the tasks that use them."""

import asyncio
import ctypes
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, stack_size
from time import perf_counter
from typing import Any, TypeVar

from fastspec.config import SamplingParams
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import StreamEvent

Result = TypeVar("Result")
Call = tuple[Callable[[], Any], Future]
Events = tuple[float, list[StreamEvent]]

logger = logging.getLogger(__name__)

_OMP_PAUSE_SOFT = 1
_STACK_BYTES = 2**26  # grammars and templates are compiled recursively


class EngineFailure(Exception):
    """The engine cannot step, whatever the request."""


class Generation:
    """The texts of some prompts, as they grow.

    Attributes:
        num_texts: of all prompts together.
        places: of the prompts, by the ids of their requests.
        prompt_lens: tokens of the prompt of each request.
        num_left: texts of each request that have not ended.
    """

    def __init__(self, num_texts: int):
        self.num_texts = num_texts
        self.places: dict[str, int] = {}
        self.prompt_lens: dict[str, int] = {}
        self.num_left: dict[str, int] = {}
        self.inbox: asyncio.Queue[Events | EngineFailure] = asyncio.Queue()

    async def steps(self) -> AsyncIterator[Events]:
        """What each step of the engine added, and when, by perf_counter().

        Raises:
            EngineFailure: the engine cannot continue.
        """
        num_left = self.num_texts
        while num_left:
            step = await self.inbox.get()
            if isinstance(step, EngineFailure):
                raise step
            num_left -= sum(event.output is not None for event in step[1])
            yield step


class PromptThread:
    """Uses the tokenizer for one request after the other, so that no engine step waits for it."""

    def __init__(self):
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._ends = False
        self._thread = Thread(target=self._run, name="fastspec-prompts", daemon=True)

    def start(self) -> None:
        """Begin."""
        _start(self._thread)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    async def stop(self) -> None:
        """End the thread after its current call; calls that are waiting fail."""
        self._ends = True
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    def ask(self, call: Callable[[], Any]) -> Future:
        """Run a call, such as one that makes ids, unless its future is cancelled before."""
        return _ask(self._calls, call)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, future = asked
            _answer((_fail_at_end if self._ends else call, future))


class EngineThread:
    """Steps an engine while it has requests, and delivers the events of each.

    Everything that touches the engine happens in this thread, between two steps; tasks wait only
    for their own texts. The ids of prompts are made beforehand in another thread.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.num_texts = 0  # asked for and not ended
        self._prompts = PromptThread()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._generations: dict[str, Generation] = {}  # by the ids of requests that run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="fastspec-engine", daemon=True)

    def start(self) -> None:
        """Begin, for the tasks of the running event loop.

        Call it in the thread that loaded the engine, which must not compute afterwards.
        """
        if self._loop is not None:
            raise RuntimeError("an application serves its engine once: make another for the engine")
        self._loop = asyncio.get_running_loop()
        _end_openmp_threads()
        self._prompts.start()
        _start(self._thread)

    @property
    def is_alive(self) -> bool:
        """Whether both threads run."""
        return self._prompts.is_alive and self._thread.is_alive()

    async def stop(self) -> None:
        """Abort everything and end the threads."""
        self._calls.put(None)
        await self._prompts.stop()
        await asyncio.to_thread(self._thread.join)

    async def open(
        self,
        prompts: Sequence[Callable[[], list[int]]],
        params: SamplingParams,
        is_open_ended: bool = False,
        prediction: Callable[[], list[int]] | None = None,
    ) -> Generation:
        """Queue prompts, all or none.

        Args:
            prompts: functions that make their ids, called in the thread for prompts.
            is_open_ended: whether texts may end before params.max_tokens, when the cache is full.
            prediction: makes the ids of params.prediction, in the same thread.
        Raises:
            ValueError: a prompt or parameter that cannot be run.
        """
        generation = Generation(len(prompts) * params.n)
        self.num_texts += generation.num_texts
        makers = prompts if prediction is None else [*prompts, prediction]
        made = [self._prompts.ask(make) for make in makers]
        try:
            ids = [await asyncio.wrap_future(future) for future in made]
            if prediction is not None:
                params = replace(params, prediction=ids.pop())
            add = partial(self._add, generation, ids, params, is_open_ended)
            await asyncio.wrap_future(_ask(self._calls, add))
        except BaseException:
            for future in made:
                future.cancel()
            self.close(generation)
            raise
        return generation

    def close(self, generation: Generation) -> None:
        """Abort what still runs of a generation."""
        self.num_texts -= generation.num_texts
        generation.num_texts = 0
        _ask(self._calls, lambda: self._abort(generation))

    async def convert(self, call: Callable[[], Result]) -> Result:
        """Run a call in the thread for prompts; until it ends, it counts as a text."""
        self.num_texts += 1
        try:
            return await asyncio.wrap_future(self._prompts.ask(call))
        finally:
            self.num_texts -= 1

    def _add(
        self,
        generation: Generation,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        is_open_ended: bool,
    ) -> None:
        for place, ids in enumerate(prompts):
            own = params
            if is_open_ended and params.max_tokens is not None:
                room = max(1, self.engine.num_cache_tokens - len(ids))
                own = replace(params, max_tokens=min(params.max_tokens, room))
            request_id = self.engine.add_request(ids, own)
            self._generations[request_id] = generation
            generation.places[request_id] = place
            generation.prompt_lens[request_id] = len(ids)
            generation.num_left[request_id] = params.n

    def _abort(self, generation: Generation) -> None:
        for request_id in generation.places:
            if self._generations.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def _run(self) -> None:
        num_failures = 0
        while self._do_calls():
            if not self.engine.has_unfinished:
                continue
            try:
                self._deliver(self.engine.step())
                num_failures = 0
            except BaseException as error:  # a thread that ends would leave every client waiting
                num_failures += 1
                logger.exception("an engine step failed")
                # An Exception may be a drafter's, which does no harm; a panic of a library is none.
                if not isinstance(error, Exception) or num_failures > len(self.engine.drafters):
                    self._fail(EngineFailure(f"{type(error).__name__} in an engine step"))
        self._fail(EngineFailure("the server is shutting down"))

    def _do_calls(self) -> bool:
        """Run the waiting calls, or wait for one if the engine is idle; False at the end."""
        waits = not self.engine.has_unfinished
        while True:
            try:
                asked = self._calls.get(block=waits)
            except Empty:
                return True
            if asked is None:
                return False
            waits = False
            _answer(asked)

    def _deliver(self, events: list[StreamEvent]) -> None:
        """Deliver the events of a step to those who wait for them."""
        mail: dict[Generation, list[StreamEvent]] = {}
        for event in events:
            request_id = event.request_id
            generation = self._generations.get(request_id)
            if generation is None:  # of who else uses the engine
                continue
            mail.setdefault(generation, []).append(event)
            if event.output is not None:
                generation.num_left[request_id] -= 1
                if not generation.num_left[request_id]:
                    del self._generations[request_id]
        now = perf_counter()
        self._post({generation: (now, content) for generation, content in mail.items()})

    def _fail(self, error: EngineFailure) -> None:
        """End everything that runs."""
        generations = {*self._generations.values()}
        self._post(dict.fromkeys(generations, error))
        for generation in generations:
            try:
                self._abort(generation)
            except BaseException:  # or a panic of a library: the others have to end, too
                logger.exception("a text could not be ended")

    def _post(self, mail: Mapping[Generation, Events | EngineFailure]) -> None:
        def put() -> None:
            for generation, content in mail.items():
                generation.inbox.put_nowait(content)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(put)


def _end_openmp_threads() -> None:
    """End the OpenMP worker threads of this thread.

    OpenMP keeps them for each thread that has used it. If there are more of them than cores, GNU's
    implementation lets them sleep between any two operations, which made a step take twice as long.
    """
    loaded = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(loaded, "omp_pause_resource_all"):
        loaded.omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _start(thread: Thread) -> None:
    before = stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        stack_size(before)


def _ask(calls: SimpleQueue[Call | None], call: Callable[[], Any]) -> Future:
    """Queue a call for the thread that runs them."""
    future: Future = Future()
    calls.put((call, future))
    return future


def _answer(asked: Call) -> None:
    """Run a call, unless nobody waits for it any more."""
    call, future = asked
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except Exception as error:  # whatever it is, it is the caller's
            future.set_exception(error)
        except BaseException as error:  # a panic of a tokenizer's or a grammar's library
            logger.exception("a request could not be read")
            future.set_exception(EngineFailure(f"{type(error).__name__} in a request"))


def _fail_at_end() -> None:
    raise EngineFailure("the server is shutting down")
