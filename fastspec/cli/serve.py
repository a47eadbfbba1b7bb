"""`fastspec serve`: OpenAI's HTTP interface and a page that shows who wrote each token."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.errors import check_draft, note, quiet_libraries, usage_errors
from fastspec.cli.options import Config, Draft, Flags, Target, Threads, with_flags
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.files import read_text
from fastspec.config.serve import ENGINE_DEFAULTS, ServeConfig
from fastspec.serve.loading import ServedEngine, extra_specs

Methods = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Methods that can be chosen beside --method, with commas between them; the K of"
        " --num-speculative-tokens is theirs, too. none can always be chosen.",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Chat template in Jinja, in the place of the tokenizer's own."
    ),
]


@with_flags
def serve(
    serving: Annotated[ServeConfig, Flags()],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags(**ENGINE_DEFAULTS)],
    target: Target = "tiny",
    draft: Draft = None,
    config_file: Config = None,
    methods: Methods = "prompt_lookup,ngram",
    chat_template: ChatTemplate = None,
    threads: Threads = None,
) -> None:
    """Serve OpenAI's HTTP interface, and a page that shows who wrote each token."""
    with usage_errors():
        has_keys = bool(serving.api_keys())
    served = checked_engine(target, draft, spec, config, methods, chat_template, threads)
    try:
        from fastspec.serve.app import is_loopback
        from fastspec.serve.server import listen, new_server
    except ImportError as error:
        message = f"{error}; pip install 'fastspec-kernels[serve]'"
        raise typer.BadParameter(message) from error
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with listen(serving) as listener:
        quiet_libraries()
        engine = served.load()
        if not has_keys and not is_loopback(serving.host):
            note(f"whoever reaches {serving.host} may use this server: there are no API keys")
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        port = listener.getsockname()[1]
        note(f"serving {Path(target).name} at http://{host}:{port}/ until Ctrl-C")
        new_server(engine, serving, Path(target).name).run(sockets=[listener])


def checked_engine(
    target: str,
    draft: str | None,
    spec: SpecConfig,
    config: EngineConfig,
    extra_methods: str,
    chat_template: Path | None,
    threads: int | None,
) -> ServedEngine:
    """An engine to load, with its own drafter and those of other methods, by their names."""
    check_draft(spec.method, draft)
    with usage_errors():
        return ServedEngine(
            target,
            draft,
            spec,
            config,
            extra_specs(extra_methods, spec),
            None if chat_template is None else read_text("chat_template", chat_template),
            threads,
        )
