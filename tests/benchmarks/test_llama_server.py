"""How `python -m benchmarks.llama_server` times a server: by what the server says."""

import sys
from argparse import Namespace

import pytest

from benchmarks import llama_server

# Tells of 3 tokens in 20 ms for every prompt token, once it has said twice that it is not ready.
SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    waits = 2

    def do_GET(self):
        Handler.waits -= 1
        self.send_response(503 if Handler.waits >= 0 else 200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["n_predict"] == 4 and asked["temperature"] == 0 and asked["ignore_eos"]
        num = len(asked["prompt"])
        self.send_response(200)
        self.end_headers()
        timings = {{"predicted_n": 3 * num + 1, "predicted_ms": 20.0 * num}}
        self.wfile.write(json.dumps({{"timings": timings}}).encode())

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def programs(tmp_path):
    def folder(text):
        (tmp_path / "llama-server").write_text(text)
        (tmp_path / "llama-server").chmod(0o755)
        return tmp_path

    return folder


OPTIONS = Namespace(threads=1, tokens=4)


def test_tokens_after_the_first_by_the_servers_clock(programs):
    prompts = [[5, 6], [7, 8, 9]]
    folder = programs(SERVER)
    speed = llama_server.llama_cpp(folder, folder / "model", "none", prompts, OPTIONS)
    assert speed == pytest.approx(150)


def test_a_server_that_does_not_start_is_said(programs):
    folder = programs("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="llama-server ended with exit status 3"):
        llama_server.llama_cpp(folder, folder / "model", "none", [[5]], OPTIONS)
