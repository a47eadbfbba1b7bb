"""Runs the application until a signal ends it."""

import errno
import socket
from math import ceil

import uvicorn

from fastspec.config.serve import ServeConfig
from fastspec.engine.engine import Engine
from fastspec.serve.app import create_app

_OF_PORTS = (errno.EADDRINUSE, errno.EACCES)  # all else that binding refuses is the address


def listen(config: ServeConfig) -> socket.socket:
    """The socket of a server; OSError, by the field's name, if it is not available."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        name = "port" if error.errno in _OF_PORTS else "host"
        raise OSError(f"{name}: {error.strerror or error}") from error
    except TypeError as error:  # no name that DNS can have
        raise OSError(f"host: {config.host!r}: {error}") from error


def new_server(engine: Engine, config: ServeConfig, model: str) -> uvicorn.Server:
    """A server that is not running yet; `run(sockets=[listen(config)])` runs it.

    On SIGTERM and SIGINT it accepts no more connections, gives requests `config.drain_timeout`
    seconds to finish and aborts the rest.
    """
    return uvicorn.Server(
        uvicorn.Config(
            create_app(engine, config, model),
            timeout_graceful_shutdown=ceil(config.drain_timeout),
            access_log=False,
            server_header=False,
            log_level="warning",
            ws="none",
        )
    )
