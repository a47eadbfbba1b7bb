"""The server: the engine behind OpenAI's HTTP interface, its page, and a chat in the terminal."""

from collections.abc import Mapping
from typing import Any


def ray_app(args: Mapping[str, Any]) -> Any:
    """The server as an application of Ray Serve, for `serve run fastspec.serve:ray_app`.

    Args:
        args: target, draft, methods, chat_template, threads, num_replicas, and the options of
            ServeConfig, SpecConfig and EngineConfig by their names; texts are read as JSON where
            the option is no text.
    Raises:
        ValueError: an argument that is none, or a value that it does not take.
    """
    from fastspec.serve.on_ray import application

    return application(args)
