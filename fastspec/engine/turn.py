"""A fair lock for an engine that several threads share."""

from threading import Lock, get_ident


class Turn:
    """A lock that waiting threads get in turn, however soon its holder acquires it again.

    A plain lock that a loop releases and reacquires at once may never reach another thread.

    Raises:
        RuntimeError: the holding thread acquires it again: a drafter, a schedule or a tokenizer
            called back into the engine during a step.
    """

    def __init__(self):
        self._entry, self._inside = Lock(), Lock()
        self._threads: set[int] = set()  # that hold it, or wait for it

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it or waits for it, so that it must not acquire it now.

        That matters to what the garbage collector runs, which may be at any point.
        """
        return get_ident() in self._threads

    def __enter__(self) -> None:
        thread = get_ident()
        if thread in self._threads:
            raise RuntimeError("engine: called from within its own step, by a part of that step")
        self._threads.add(thread)
        try:
            with self._entry:
                self._inside.acquire()
        except BaseException:  # an interrupt
            self._threads.discard(thread)
            raise

    def __exit__(self, *_) -> None:
        try:
            self._inside.release()
        finally:
            self._threads.discard(get_ident())
