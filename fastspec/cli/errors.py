"""Every failure is one line on stderr, with exit code 2 for usage errors and 1 for others."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import typer
from typer.core import TyperGroup

from fastspec.cli.help import WholeSummaries

# typer carries its own copy of click since 0.2x; the base of its public error is the same in both.
_CommandLineError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

_is_checked = ContextVar("whether the options of the command are checked", default=False)
_USAGE = 2
_INTERRUPTED = 130  # what typer makes of Ctrl-C: 128 and the signal, as shells have it
_OPTIONS_OF_FIELDS = (  # the first of a field that the command has
    ("drafter", "draft"),
    ("drafter", "start"),
    ("chat", "target"),  # where its template is
    ("documents", "files"),
    ("outputs", "outputs_file"),
    ("prompts", "prompts_file"),
    ("config", "config_file"),
    ("input", "input_file"),
    ("output", "output_file"),
)

_OPTIONS_ELSEWHERE = {  # names of vLLM and transformers, and what the commands have in their place
    "--model": ("--target",),
    "--speculative-config": ("--method", "--num-speculative-tokens"),
    "--speculative-model": ("--draft",),
    "--assistant-model": ("--draft",),
    "--num-spec-tokens": ("--num-speculative-tokens",),
    "--max-num-seqs": ("--max-batch-size",),
    "--max-new-tokens": ("--max-tokens",),
}
_PAGES = {"--tensor-parallel-size": "docs/scaling.md"}  # of what is no option


class OneLineErrors(WholeSummaries):
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
        if sys.stdout is None:  # closed by the shell
            report("stdout: is closed; /dev/null drops what is printed")
            raise SystemExit(1)
        typed = list(sys.argv[1:] if args is None else args)
        _is_checked.set(False)
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except _CommandLineError as error:
            command = _command(self, typed)
            report(_as_typed(_usage_message(error, command), command, typed))
            raise SystemExit(error.exit_code) from error
        except typer.Abort as error:
            report("aborted")
            raise SystemExit(1) from error
        except (ValueError, OSError) as error:
            message = str(error) or type(error).__name__
            report(_as_typed(message, _command(self, typed), typed))
            is_usage = isinstance(error, ValueError) and not _is_checked.get()
            raise SystemExit(_USAGE if is_usage else 1) from error
        if code == _INTERRUPTED:
            report("interrupted")
        raise SystemExit(code if isinstance(code, int) else 0)


def _command(group: TyperGroup, typed: list[str]) -> Any:
    """The command that the command line names, if there is one."""
    command: Any = group
    for argument in typed:
        found = getattr(command, "commands", {}).get(argument)
        if found is None and not argument.startswith("-"):
            break
        command = found or command
    return command


def _usage_message(error: Any, command: Any) -> str:
    """The message of a command-line error; for another program's option, ours of that meaning."""
    if not hasattr(error, "possibilities"):  # only unknown options have them
        return error.format_message()
    if page := _PAGES.get(error.option_name):
        return f"{error.message} (see {page})"
    known = {flag for parameter in command.params for flag in parameter.opts}
    ours = [flag for flag in _OPTIONS_ELSEWHERE.get(error.option_name, ()) if flag in known]
    return f"{error.message} (use {' and '.join(ours)})" if ours else error.format_message()


def _as_typed(message: str, command: Any, typed: list[str]) -> str:
    """An error with the names of fields replaced by those of the command's options.

    At its beginning any name is replaced, and further on only those that are no English words.
    """
    labels = {parameter.name: _label(parameter, typed) for parameter in command.params}
    for field, name in _OPTIONS_OF_FIELDS:
        if name in labels:
            labels.setdefault(field, labels[name])

    def label(match: re.Match[str]) -> str:
        return match[1] + labels.get(match[2], match[2])

    if re.match(r"\S+: .*, line \d+[:,] ", message):  # the fields of a file's row keep their names
        message, _, rest = message.partition(": ")
        return f"{labels.get(message, message)}: {rest}"
    begun = re.sub(r"^(Invalid value: |)(\w+)(?=[:,])", label, message)
    return re.sub(r"(^|[\s([])([a-z]+_\w+)(?![\w'\"./-])", label, begun)


def _label(parameter: Any, typed: list[str]) -> str:
    """An option as the user has written it, or in its long form; the metavar of an argument."""
    options = sorted(parameter.opts, key=len, reverse=True)
    if not options[0].startswith("-"):
        return (parameter.metavar or parameter.name).rstrip(".")

    def is_typed(option: str) -> bool:
        is_long = option.startswith("--")
        return any(a.split("=")[0] == option if is_long else a[:2] == option for a in typed)

    return next(filter(is_typed, options), options[0])


def require_stdin() -> None:
    """Refuse a stdin that the shell has closed."""
    if sys.stdin is None:
        raise ValueError("stdin: is closed")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Exit code 2 for the ValueErrors of a block that runs after models are loaded."""
    is_checked = _is_checked.set(False)
    yield
    _is_checked.reset(is_checked)


def begin() -> None:
    """Options are checked: from here on, errors are those of the run and libraries are quiet.

    Only errors of transformers and of the hub reach the terminal.
    """
    _is_checked.set(True)
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def report(message: str) -> None:
    """One line on stderr."""
    typer.echo(f"fastspec: error: {' '.join(message.split())}", err=True)


def note(message: str) -> None:
    """One line on stderr that is not an error."""
    typer.echo(f"fastspec: note: {message}", err=True)
