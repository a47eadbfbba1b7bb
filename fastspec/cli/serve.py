"""`fastspec serve`: OpenAI's HTTP API and a page that shows who wrote each token."""

import logging
from typing import Annotated

from fastspec.cli.errors import begin, note
from fastspec.cli.options import Config, Flags, command
from fastspec.config import EngineConfig, SpecConfig
from fastspec.config.methods import method_named
from fastspec.config.serve import ENGINE_DEFAULTS, ServeConfig
from fastspec.models.named import shown_name
from fastspec.serve.loading import Choices
from fastspec.tools.settings import Models


@command
def serve(
    models: Annotated[Models, Flags()],
    serving: Annotated[ServeConfig, Flags()],
    choices: Annotated[Choices, Flags()],
    spec: Annotated[SpecConfig, Flags()],
    config: Annotated[EngineConfig, Flags(**ENGINE_DEFAULTS)],
    config_file: Config = None,
) -> None:
    """Serve OpenAI's HTTP API, and a page that shows who wrote each token."""
    has_keys, served = bool(serving.api_keys()), choices.engine(models, spec, config)
    try:
        from fastspec.serve.app import is_loopback
        from fastspec.serve.server import listen, new_server
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'fastspec-kernels[serve]'") from error
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with listen(serving) as listener:
        begin()
        engine, name = served.load(), shown_name(models.target)
        if not has_keys and not is_loopback(serving.host):
            note(f"no API keys are set: anyone who can reach {serving.host} can use this server")
        if method_named(spec.method).chooses and not engine.is_speculative:  # as in generate
            note("no draft model: plain decoding; --method suffix, for example, needs none")
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        note(f"serving {name} at http://{host}:{listener.getsockname()[1]}/ until Ctrl-C")
        new_server(engine, serving, name).run(sockets=[listener])
