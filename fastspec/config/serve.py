"""The address and the limits of `fastspec serve`."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.config.files import read_text
from fastspec.config.options import (
    PATH,
    TEXT,
    Kind,
    Options,
    documented,
    integer,
    number,
    option,
)

# Of EngineConfig, in the place of its own defaults where an engine serves.
ENGINE_DEFAULTS: dict[str, Any] = {"load_format": "safetensors"}
_NAMES = Kind(
    "a list of names",
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(n, str) and n for n in value),
    tuple,
    list[str],
)
_NAME = Kind("a non-empty string", lambda value: isinstance(value, str) and value != "")
_SECONDS = number("a number of seconds > 0", lambda value: value > 0)


@documented
@dataclass(frozen=True)
class ServeConfig(Options):
    """The address and the limits of a server."""

    host: str = option(
        "127.0.0.1",
        _NAME,
        "Address to listen on; by default only this machine can connect.",
        "0.0.0.0 is every interface: then set API keys, and put a TLS proxy in front.",
    )
    port: int = option(8000, integer(0, 65535), "Port to listen on; 0 picks a free one.")
    served_model_name: str | None = option(
        None, _NAME, "Name of the model in requests and responses; by default that of --target."
    )
    api_keys_file: str | Path | None = option(
        None,
        PATH,
        "File with API keys, one per line; requests must send one of them as a bearer token.",
        "Only `/health` and the page itself, which contains nothing secret, need none.",
    )
    api_keys_variable: str | None = option(
        None,
        TEXT,
        "Name of an environment variable with API keys, separated by whitespace or commas.",
        "Keys are never read from the command line, which other users of the machine can see.",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        _NAMES,
        "Name to accept in the Host header; may be given several times, * is any.",
        "On a loopback address, the names of this machine's loopback are always accepted and all"
        " others refused, so that no web page can reach the server by a name of its own (DNS"
        " rebinding). On other addresses every name is accepted unless some are given.",
    )
    max_requests: int = option(
        256,
        integer(1),
        "Maximum number of texts generated or waiting at once; further requests get status 429.",
        "Each of the n texts of each prompt counts. Up to config.max_batch_size run together.",
    )
    max_body_bytes: int = option(
        2**20, integer(1, None), "Maximum size of a request's body in bytes."
    )
    max_prompt_tokens: int | None = option(
        None, integer(1), "Maximum tokens per prompt; by default what the model has room for."
    )
    max_completion_tokens: int = option(
        4096,
        integer(1),
        "Maximum number of new tokens that a request may ask for.",
        "A chat that gives no number gets this many, or what model and cache have room for.",
    )
    max_n: int = option(8, integer(1), "Maximum number of texts per request (prompts times n).")
    request_timeout: float = option(
        600.0,
        _SECONDS,
        "Maximum seconds from the first byte of a request to the last byte of its response.",
        "After that its generation is aborted. Clients that read too slowly are also cut off.",
    )
    drain_timeout: float = option(
        30.0,
        _SECONDS,
        "Seconds that running requests have to finish after SIGTERM or Ctrl-C.",
        "New connections are refused in the meantime; requests still running after it are aborted.",
    )

    def api_keys(self) -> tuple[str, ...]:
        """The keys from the file and the variable; ValueError if either has none."""
        keys: list[str] = []
        if self.api_keys_file is not None:
            found = read_text("api_keys_file", Path(self.api_keys_file)).split()
            if not found:
                raise ValueError(f"api_keys_file: {self.api_keys_file} contains no key")
            keys += found
        if self.api_keys_variable is not None:
            found = re.findall(r"[^\s,]+", os.environ.get(self.api_keys_variable, ""))
            if not found:
                raise ValueError(f"api_keys_variable: {self.api_keys_variable} contains no key")
            keys += found
        return tuple(keys)
