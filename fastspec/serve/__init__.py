"""The server: the engine behind OpenAI's HTTP API, with a page, alone or on Ray."""

from collections.abc import Mapping
from typing import Any


def ray_app(args: Mapping[str, Any]) -> Any:
    """The server as a Ray Serve application, for `serve run fastspec.serve:ray_app`.

    Args:
        args: target, draft, methods, chat_template, threads, num_replicas, and the options of
            ServeConfig, SpecConfig and EngineConfig by their names; strings are parsed as JSON
            unless the option is a string.
    Raises:
        ValueError: an unknown argument, or a value that it does not accept.
    """
    from fastspec.serve.on_ray import application

    return application(args)
