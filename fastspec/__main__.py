"""`python -m fastspec`, and the command `fastspec`."""

import os
import signal

_INTERRUPTED = 130  # as of a command that Ctrl-C ends later


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly while it is still being imported."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a script's "&"
    if raises:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    from fastspec.cli import app

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="fastspec")
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


if __name__ == "__main__":
    main()
