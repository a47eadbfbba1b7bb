"""A fair lock for an engine that several threads share."""

from threading import Lock, RLock, get_ident
from typing import Any


class Turn:
    """A lock that waiting threads get in turn, however soon its holder acquires it again.

    A plain lock that a loop releases and reacquires at once may never reach another thread.

    Raises:
        RuntimeError: the holding thread acquires it again: a drafter, a schedule or a tokenizer
            called back into the engine during a step.
    """

    def __new__(cls):
        """Make an object whose `__exit__` is the lock's own, which no interrupt can precede."""
        entry, inside = Lock(), RLock()
        turn: Any = object.__new__(type(cls.__name__, (cls,), {"__exit__": inside.__exit__}))
        turn._entry, turn._inside = entry, inside
        turn._waiting = set()
        return turn

    __exit__: Any
    _entry: Lock
    _inside: Any  # a reentrant lock, because it knows its owner
    _waiting: set[int]  # threads

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it or waits for it, so that it must not acquire it now.

        That matters to what the garbage collector runs, which may be at any point.
        """
        return self._inside._is_owned() or get_ident() in self._waiting

    def __enter__(self) -> None:
        thread = get_ident()
        if self._inside._is_owned() or thread in self._waiting:
            raise RuntimeError("engine: called from within its own step, by a part of that step")
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
