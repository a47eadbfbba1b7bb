"""What `fastspec serve` listens to and how much it takes on."""

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
_SECONDS = number("a number of seconds > 0", lambda value: value > 0)


@documented
@dataclass(frozen=True)
class ServeConfig(Options):
    """What a server listens to and how much it takes on."""

    host: str = option(
        "127.0.0.1",
        TEXT,
        "Address to listen on; by default this machine alone can connect.",
        "0.0.0.0 is every interface: give API keys then, and put a proxy with TLS before it.",
    )
    port: int = option(8000, integer(0, 65535), "Port to listen on; 0 takes a free one.")
    served_model_name: str | None = option(
        None, TEXT, "Name of the model in requests and answers; by default that of --target."
    )
    api_keys_file: str | Path | None = option(
        None,
        PATH,
        "File with API keys, one a line; requests must bring one of them as a bearer token.",
        "Only `/health` and the page itself, which holds nothing secret, need none.",
    )
    api_keys_variable: str | None = option(
        None,
        TEXT,
        "Name of an environment variable with API keys, separated by blanks or commas.",
        "Keys are never taken from the command line, which other users of a machine can read.",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        _NAMES,
        "Name in the Host header that is accepted; may be given several times, * is any.",
        "On a loopback address the names of this machine's loopback are accepted anyway and all"
        " others refused, so that no web page can reach the server by a name of its own (DNS"
        " rebinding). On other addresses every name is accepted unless some are given.",
    )
    max_requests: int = option(
        256,
        integer(1),
        "Texts generated or waiting at once at most; beyond, requests get status 429.",
        "Each of the n texts of each prompt counts. config.max_batch_size of them run together.",
    )
    max_body_bytes: int = option(2**20, integer(1, None), "Bytes of a request's body at most.")
    max_prompt_tokens: int | None = option(
        None, integer(1), "Tokens of a prompt at most; by default what the model has room for."
    )
    max_completion_tokens: int = option(
        4096,
        integer(1),
        "New tokens that a request may ask for at most.",
        "A chat that names no number gets this many, or what the model has room for.",
    )
    max_n: int = option(
        8, integer(1), "Texts of one request at most: its prompts times its n, or times best_of."
    )
    request_timeout: float = option(
        600.0,
        _SECONDS,
        "Seconds from the first byte of a request to the last of its answer at most.",
        "Then its generation is aborted. It ends clients that read too slowly, too.",
    )
    drain_timeout: float = option(
        30.0,
        _SECONDS,
        "Seconds that running requests have to end after SIGTERM or Ctrl-C.",
        "New connections are refused meanwhile; what still runs then is aborted.",
    )

    def api_keys(self) -> tuple[str, ...]:
        """The keys of the file and of the variable; ValueError where one of them has none."""
        keys: list[str] = []
        if self.api_keys_file is not None:
            found = read_text("api_keys_file", Path(self.api_keys_file)).split()
            if not found:
                raise ValueError(f"api_keys_file: {self.api_keys_file} holds no key")
            keys += found
        if self.api_keys_variable is not None:
            found = re.findall(r"[^\s,]+", os.environ.get(self.api_keys_variable, ""))
            if not found:
                raise ValueError(f"api_keys_variable: {self.api_keys_variable} holds no key")
            keys += found
        return tuple(keys)
