"""Who may ask, for how much and for how long; clients that go, requests that are nonsense."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from fastspec import SamplingParams
from fastspec.config.serve import ServeConfig
from fastspec.engine.prompt_reader import PromptReader
from fastspec.serve.app import create_app
from fastspec.serve.replies import ReplyBuilder

from ..engine.probes import before_passes
from ..models import byte_tokenizer, random_model
from .helpers import assert_idle, serving, wait_for

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "import os\n", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}


class Gate:
    """Holds the engine before a pass while it is closed."""

    def __init__(self, engine):
        self._open, self.is_held = threading.Event(), threading.Event()
        self.open()
        before_passes(engine, self._pass)

    def _pass(self):
        self.is_held.set()
        assert self._open.wait(60)

    def close(self):
        self._open.clear()
        self.is_held.clear()

    def open(self):
        self._open.set()


@pytest.fixture(scope="module")
def gate(engine):
    return Gate(engine)


@pytest.fixture
def closed(gate):
    gate.close()
    yield gate
    gate.open()


LIMITS = {
    "max_requests": 2,
    "max_body_bytes": 4000,
    "max_prompt_tokens": 40,
    "max_completion_tokens": 300,
    "max_n": 2,
}


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, **LIMITS) as address, httpx2.Client(base_url=address) as client:
        yield client
    assert_idle(engine)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    return error


@contextmanager
def asking(client, body, path=COMPLETIONS):
    """A connection that has sent a request and waits; it is cut at the end of the block."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), 30) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_aborted_and_its_blocks_come_back(client, engine, closed, stream):
    aborted = engine.stats.finish_reasons["abort"]
    with asking(client, LONG | {"stream": stream}):
        assert closed.is_held.wait(30)
    closed.open()
    wait_for(lambda: engine.stats.finish_reasons["abort"] == aborted + 1)
    assert_idle(engine)


def test_a_client_that_goes_in_the_middle(client, engine, gate):
    aborted = engine.stats.finish_reasons["abort"]
    with asking(client, LONG | {"stream": True}) as connection:
        while b"data: " not in connection.recv(1000):
            pass
    wait_for(lambda: engine.stats.finish_reasons["abort"] == aborted + 1)
    assert_idle(engine)


def test_a_full_server_says_when_to_come_back(client, engine, closed):
    with asking(client, LONG | {"n": 2}):
        assert closed.is_held.wait(30)
        response = client.post(COMPLETIONS, json=SHORT)
        error = error_of(response, 429)
        assert (error["code"], response.headers["retry-after"]) == ("server_busy", "1")
    closed.open()
    wait_for(lambda: client.post(COMPLETIONS, json=SHORT).status_code == 200)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": "x" * 5000}, 413),
        ({"prompt": "x" * 41}, 400),
        ({"max_tokens": 301}, 400),
        ({"n": 3}, 400),
        ({"prompt": ["a", "b", "c"]}, 400),
        ({"logprobs": 21}, 400),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, 400),
    ],
)
def test_limits(client, fields, status):
    error_of(client.post(COMPLETIONS, json=SHORT | fields), status)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "prompt": "b"}', 400),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 3000 + b"}", 400),
        (b"[" * 3900, 400),
        (b'{"prompt": ' + b"[" * 1900 + b"]" * 1900 + b"}", 400),
        (b'{"\\n\\u0000": 1}', 400),
    ],
)
def test_malformed_bodies(client, body, status):
    headers = {"content-type": "application/json"}
    for path in (COMPLETIONS, "/v1/chat/completions", "/predict", "/tokenize", "/detokenize"):
        error = error_of(client.post(path, content=body, headers=headers), status)
        assert error["param"] is None or error["param"].encode() in body


def test_a_body_without_its_length_is_cut_off_too(client):
    headers = {"content-type": "application/json"}
    chunks = (b" " * 1000 for _ in range(20))
    error_of(client.post(COMPLETIONS, content=chunks, headers=headers), 413)


def test_bodies_of_forms_are_refused(client):
    """A web page elsewhere can post these without asking; JSON it cannot."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body, headers = json.dumps(SHORT).encode(), {"content-type": kind}
        error_of(client.post(COMPLETIONS, content=body, headers=headers), 415)
    response = client.options(COMPLETIONS, headers={"origin": "http://elsewhere"})
    assert error_of(response, 405)
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", ""])
def test_a_foreign_host_name_is_refused_on_loopback(client, host):
    for path in ("/", "/health", "/v1/models"):
        error_of(client.get(path, headers={"host": host}), 403)
    assert client.get("/health", headers={"host": "LOCALHOST:1"}).status_code == 200


def test_paths_that_are_not_there(client):
    assert "/nothing" in error_of(client.get("/nothing"), 404)["message"]
    for path in ("/", "/health", "/v1/models"):
        response = client.head(path)
        assert (response.status_code, response.content) == (200, b"")
    response = client.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_the_published_demo(client, engine):
    response = client.post("/predict", json={"prompt": "import os\n"})
    assert isinstance(response.json(), str)
    error_of(client.post("/predict", json={"prompt": "x", "max_tokens": 3}), 400)
    error = error_of(client.post("/predict", json={"prompt": "x" * 41}), 400)
    assert error["param"] == "prompt"
    with serving(engine, max_completion_tokens=3) as address:
        text = httpx2.post(f"{address}/predict", json={"prompt": "import os\n"}).json()
    assert len(text.encode()) <= 12


def test_an_engine_that_fails_answers_and_goes_on(client, engine, monkeypatch, caplog):
    def broken():
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", broken)
        error = error_of(client.post(COMPLETIONS, json=SHORT), 500)
        assert "secret" not in json.dumps(error)
        with client.stream("POST", COMPLETIONS, json=SHORT | {"stream": True}) as response:
            assert "error" in response.read().decode()
    assert "secret" in caplog.text
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    assert_idle(engine)


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


def test_a_panic_of_a_library_ends_one_request_alone(client, engine, monkeypatch):
    def broken(*_):
        raise Panic

    with monkeypatch.context() as patch:
        patch.setattr(PromptReader, "ids", broken)
        patch.setattr(PromptReader, "plain_ids", broken)
        error_of(client.post(COMPLETIONS, json=SHORT), 500)
        error_of(client.post("/tokenize", json={"prompt": "a"}), 500)
    assert client.get("/health").status_code == 200
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_panic_in_a_step_ends_what_runs_at_once(engine, monkeypatch):
    def broken(*_):
        raise Panic

    with serving(engine) as address:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", broken)
            patch.setattr(engine, "abort", broken)  # a text's end is decoded by the same library
            error_of(httpx2.post(address + COMPLETIONS, json=SHORT, timeout=30), 500)
        assert httpx2.get(f"{address}/health").status_code == 200
        assert httpx2.post(address + COMPLETIONS, json=SHORT).status_code == 200
    assert_idle(engine)


@pytest.mark.check
def test_deep_grammars_do_not_end_the_server(tmp_path):
    rules = [f"r{n}: r{n + 1}" for n in range(4000)]  # 54 kB; the native stack is 8 MiB or less
    grammar = "\n".join(["start: r0", *rules, 'r4000: "a"'])
    script = f"""
import httpx2
from tests.serve.helpers import new_engine, serving
with serving(new_engine()) as address:
    body = {{"prompt": "a", "max_tokens": 2, "guided_grammar": {grammar!r}}}
    print(httpx2.post(address + "{COMPLETIONS}", json=body, timeout=60).status_code)
    body["guided_grammar"] += "\\n" * 2**16
    print(httpx2.post(address + "{COMPLETIONS}", json=body, timeout=60).status_code)
"""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.stdout.split() == ["200", "400"], run.stderr[-2000:]


def test_our_own_bugs_show_nothing_of_the_inside(client, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(ReplyBuilder, "whole", broken)
    answer = client.post(COMPLETIONS, json=SHORT)
    assert "secret" not in str(error_of(answer, 500))
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = httpx2.get(f"{client.base_url}/metrics").text  # the server has closed the connection
    counted = re.search(r'http_responses_total{.*status="500"} (\S+)', page)
    assert counted is not None
    assert float(counted[1]) >= 1


def test_requests_beside_the_server_disturb_nobody(client, engine, closed):
    """Somebody else uses the engine, too, and steals no events of the server's requests."""
    with asking(client, LONG | {"stream": True}) as connection:
        assert closed.is_held.wait(30)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        closed.open()
        engine.add_request("x", SamplingParams(max_tokens=3))
        (output,) = engine.generate(["import os\n"], params)
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(100_000)
    texts = re.findall(rb'"text": ("(?:[^"\\]|\\.)*")', received)
    assert "".join(json.loads(text) for text in texts) == output.text
    assert_idle(engine)


def test_what_a_drafter_raises_is_logged_and_harms_nobody(client, engine, monkeypatch, caplog):
    def broken(batch):
        raise ZeroDivisionError("in a drafter")

    expected = client.post(COMPLETIONS, json=SHORT).json()["choices"]
    monkeypatch.setattr(engine.drafter, "propose", broken)
    assert client.post(COMPLETIONS, json=SHORT).json()["choices"] == expected
    client.post(COMPLETIONS, json=SHORT)
    assert "in a drafter" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_is_limited(engine, closed, stream):
    with serving(engine, request_timeout=0.3) as address:
        response = httpx2.post(address + COMPLETIONS, json=LONG | {"stream": stream})
        assert error_of(response, 504)["code"] == "timeout"
        closed.open()
        assert_idle(engine)


def test_a_reader_that_stops_is_let_go(engine):
    """Its connection takes nothing any more, not even the end."""
    body = json.dumps(LONG | {"stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        await asyncio.Event().wait()

    async def ask():
        app = create_app(engine, ServeConfig(request_timeout=0.2))
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 30)
            assert_idle(engine)

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_a_server_are_told(engine, closed, caplog, stream):
    with ExitStack() as stack:
        address = stack.enter_context(serving(engine, drain_timeout=1))
        ending = threading.Timer(0.5, stack.close)
        ending.start()
        response = httpx2.post(address + COMPLETIONS, json=LONG | {"stream": stream}, timeout=30)
        closed.open()
        ending.join()
    assert error_of(response, 503)["message"] == "the server is shutting down"
    assert "Traceback" not in caplog.text
    assert_idle(engine)


def test_a_second_interrupt_ends_the_threads_and_raises_nothing(engine):
    app = create_app(engine)
    is_up = asyncio.Event()
    before = {*threading.enumerate()}
    started = []

    async def serve():
        async with app.router.lifespan_context(app):
            started.extend({*threading.enumerate()} - before)
            is_up.set()
            await asyncio.Event().wait()

    async def interrupted():
        task = asyncio.ensure_future(serve())
        await is_up.wait()
        task.cancel()  # as uvicorn does to the lifespan when it is told to end twice
        await task

    asyncio.run(interrupted())
    assert {thread.name for thread in started} == {"fastspec-prompts", "fastspec-engine"}
    assert not any(thread.is_alive() for thread in started)


def test_slow_bodies_count_too(engine):
    def dribble():
        yield b'{"prompt": '
        threading.Event().wait(0.5)
        yield b'"x"}'

    with serving(engine, request_timeout=0.2) as address:
        headers = {"content-type": "application/json"}
        response = httpx2.post(address + COMPLETIONS, content=dribble(), headers=headers)
        error_of(response, 504)


def test_api_keys(engine, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\ntwo\n", encoding="utf-8")
    monkeypatch.setenv("SOME_KEYS", "three, four")
    config = {"api_keys_file": tmp_path / "keys", "api_keys_variable": "SOME_KEYS"}
    with serving(engine, **config) as address, httpx2.Client(base_url=address) as client:
        for header in (None, "Bearer", "Bearer five", "Basic one", "one", "Bearer onetwo"):
            headers = {"authorization": header} if header else {}
            for path in ("/v1/models", "/metrics", "/nothing"):
                response = client.get(path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
        for key in ("one", "two", "three", "four"):
            headers = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_paths_are_not_corrected(engine):
    with serving(engine) as address:
        assert error_of(httpx2.post(f"{address}{COMPLETIONS}/", json={"prompt": "a"}), 404)


@pytest.mark.parametrize("field", ["api_keys_file", "api_keys_variable"])
def test_no_keys_where_some_were_promised(field, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(" \n", encoding="utf-8")
    monkeypatch.delenv("SOME_KEYS", raising=False)
    value = tmp_path / "keys" if field == "api_keys_file" else "SOME_KEYS"
    with pytest.raises(ValueError, match=f"{field}: .* contains no key"):
        ServeConfig(**{field: value}).api_keys()


def test_other_names_of_the_host(engine):
    with serving(engine, allowed_host=("model.example",)) as address:
        for host, status in (("model.example", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            assert httpx2.get(f"{address}/health", headers={"host": host}).status_code == status
    with serving(engine, allowed_host=("*",)) as address:
        assert httpx2.get(f"{address}/health", headers={"host": "x"}).status_code == 200


def test_a_slow_reader_gets_everything(client, engine):
    texts = []
    with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
        for number, line in enumerate(response.iter_lines()):
            if number % 50 == 0:
                threading.Event().wait(0.02)
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    assert "".join(texts) == engine.generate(["import os\n"], params)[0].text


def test_sigterm_lets_running_requests_end(tmp_path):
    """The command itself, in a process of its own."""
    random_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    command = [sys.executable, "-m", "fastspec", "serve", "--target", "target", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    try:
        assert "no draft model: plain decoding" in server.stderr.readline()
        address = server.stderr.readline().split(" at ")[1].split("/ until")[0]
        body = LONG | {"max_tokens": 400, "stream": True}
        with httpx2.stream("POST", address + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(first[6:])["choices"][0]["finish_reason"] is None
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert len(rest) == 400
        server.wait(30)
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.stderr.close()


def test_a_port_that_is_taken_and_other_refusals(tmp_path, engine):
    from typer.testing import CliRunner

    from fastspec.cli import app

    with serving(engine) as address:
        port = address.rpartition(":")[2]
        for arguments, told in (
            (["--port", port], "error: --port: Address already in use"),
            (["--port", "99999"], "--port"),
            (["--host", ""], "error: --host: expected a non-empty string"),
            (["--host", "999.1.1.1"], "error: --host: "),
            (["--host", "\u00fc..b"], "error: --host: '\u00fc..b': "),
            (["--served-model-name", ""], "error: --served-model-name: expected"),
            (["--methods", "magic"], "error: --methods: did you mean 'mag'? expected one of "),
            (["--methods", "mag,auto"], "tree, got 'auto'"),
            (["--api-keys-variable", "NOT_SET_AT_ALL"], "--api-keys-variable"),
            (["--chat-template", str(tmp_path / "none"), "--port", "0"], "no such file"),
        ):
            result = CliRunner().invoke(app, ["serve", *arguments])
            assert result.exit_code in (1, 2)
            assert told in result.stderr
            assert len(result.stderr.splitlines()) == 1
