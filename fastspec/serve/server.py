"""Runs the application until a signal ends it."""

import socket
from math import ceil

import uvicorn

from fastspec.config.serve import ServeConfig
from fastspec.engine.engine import Engine
from fastspec.serve.app import create_app


def listen(config: ServeConfig) -> socket.socket:
    """The socket of a server; OSError if its address or port is not available."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family)


def new_server(engine: Engine, config: ServeConfig, model: str) -> uvicorn.Server:
    """A server that is not running yet; `run(sockets=[listen(config)])` runs it.

    On SIGTERM and SIGINT it accepts no more connections, gives requests `config.drain_timeout`
    seconds to finish and aborts the rest.
    """
    return uvicorn.Server(
        uvicorn.Config(
            create_app(engine, config, model, config.api_keys()),
            timeout_graceful_shutdown=ceil(config.drain_timeout),
            access_log=False,
            server_header=False,
            log_level="warning",
            ws="none",
        )
    )
