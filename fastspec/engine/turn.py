"""A fair lock for an engine that several threads share."""

from os import getpid
from threading import Lock, RLock, get_ident
from typing import Any

import torch


class Turn:
    """A lock that waiting threads get in turn, however soon its holder acquires it again.

    A plain lock that a loop releases and reacquires at once may never reach another thread.

    Raises:
        RuntimeError: the holding thread acquires it again: a drafter, a schedule or a tokenizer
            called back into the engine during a step. Or this process was forked from the one that
            made it, and a step would wait for threads that only that one has.
    """

    def __new__(cls):
        """Make an object whose `__exit__` is the lock's own, which no interrupt can precede."""
        entry, inside = Lock(), RLock()
        turn: Any = object.__new__(type(cls.__name__, (cls,), {"__exit__": inside.__exit__}))
        turn._entry, turn._inside = entry, inside
        turn._waiting = set()
        turn._process = getpid()
        return turn

    __exit__: Any
    _entry: Lock
    _inside: Any  # a reentrant lock, because it knows its owner
    _waiting: set[int]  # threads
    _process: int

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it or waits for it, so that it must not acquire it now.

        That matters to what the garbage collector runs, which may be at any point. A process that
        was forked must not either, before a call has made it its own.
        """
        is_waited_for = self._inside._is_owned() or get_ident() in self._waiting
        return is_waited_for or getpid() != self._process

    def __enter__(self) -> None:
        thread = get_ident()
        if self._inside._is_owned() or thread in self._waiting:
            raise RuntimeError("engine: called from within its own step, by a part of that step")
        if getpid() != self._process:
            self._take_over()
        try:
            self._waiting.add(thread)
            with self._entry:
                self._inside.acquire()
            self._waiting.discard(thread)
        except BaseException:  # an interrupt
            self._waiting.discard(thread)
            if self._inside._is_owned():
                self._inside.release()
            raise

    def _take_over(self) -> None:
        """Make it this process's, which was forked."""
        if torch.get_num_threads() > 1:
            raise RuntimeError(
                "engine: made before a fork, which torch's threads do not survive; start processes"
                " by multiprocessing's 'spawn', or call torch.set_num_threads(1) first in this one"
            )
        try:
            is_held = self._entry.locked() or not self._inside.acquire(blocking=False)
        finally:
            if self._inside._is_owned():
                self._inside.release()
        if is_held and getpid() != self._process:  # not by another thread of this process
            raise RuntimeError("engine: forked during a call of another thread; make another")
        self._waiting.clear()
        self._process = getpid()
