"""Every failure is one line on stderr, with exit code 2 for usage and 1 for the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperGroup

from fastspec.config.speculation import METHODS

# typer carries its own copy of click since 0.2x; the base of its public error is the same in both.
_CommandLineError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])


class OneLineErrors(TyperGroup):
    """A command group that reports errors without usage text or traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except _CommandLineError as error:
            if message := error.format_message():  # none where help was shown instead
                report(message)
            raise SystemExit(error.exit_code) from error
        except typer.Abort as error:
            report("aborted")
            raise SystemExit(1) from error
        except (ValueError, OSError) as error:
            report(str(error) or type(error).__name__)
            raise SystemExit(1) from error
        raise SystemExit(code if isinstance(code, int) else 0)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the ValueErrors of a block into usage errors."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def drafting_method(method: str) -> str:
    """The method, unless it is one that proposes nothing or leaves the choice open."""
    drafting = tuple(name for name in METHODS if name not in ("auto", "none"))
    if method not in drafting:
        raise ValueError(f"method: expected one of {drafting}, got {method!r}")
    return method


def check_can_write(option: str, file: Path | None) -> None:
    """Refuse a file in a folder that does not exist, or a folder, before anything slow starts."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{option}: no such folder: {str(file.parent)!r}")
    if file.is_dir():
        raise typer.BadParameter(f"{option}: expected a file, {str(file)!r} is a folder")


def report(message: str) -> None:
    """One line on stderr."""
    typer.echo(f"fastspec: error: {' '.join(message.split())}", err=True)


def note(message: str) -> None:
    """One line on stderr that is no error."""
    typer.echo(f"fastspec: note: {message}", err=True)
