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
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._holder == get_ident()

    def __enter__(self) -> None:
        if self._holder == get_ident():
            raise RuntimeError("engine: called from within its own step, by a part of that step")
        with self._entry:
            self._inside.acquire()
        self._holder = get_ident()

    def __exit__(self, *_) -> None:
        self._holder = None
        self._inside.release()
