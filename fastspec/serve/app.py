"""The HTTP API: OpenAI's endpoints, vLLM's for tokens, /predict, health, metrics and version."""

import asyncio
import base64
import hashlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from ipaddress import ip_address
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

import fastspec
from fastspec.config import SamplingParams
from fastspec.config.checks import require
from fastspec.config.serve import ServeConfig
from fastspec.engine.engine import Engine
from fastspec.engine.outputs import RequestOutput
from fastspec.engine.prompts import PromptTooLong, telling_which
from fastspec.serve.engine_thread import EngineFailure, EngineThread, Generation
from fastspec.serve.metrics import ServerMetrics
from fastspec.serve.prompts import PromptMaker
from fastspec.serve.replies import ReplyBuilder, error_body, server_event, token_text
from fastspec.serve.requests import (
    FIELDS,
    ParsedRequest,
    chat,
    completion,
    detokenize,
    field_of,
    parse_body,
    tokenize,
)

logger = logging.getLogger(__name__)

_LAST_WORDS = 1.0  # seconds that a client has to take the end of a stream that is cut
_RETRY_AFTER = {"Retry-After": "1"}
_READ = ["GET", "HEAD"]
_OPEN_PATHS = ("/", "/health")  # for whoever has no API key
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_PREDICT_TOKENS = 40  # as in the published demo

Receive = Callable[[], Any]
Send = Callable[[Mapping[str, Any]], Any]


class Refused(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        body = error_body(status, message, code, param)
        self.response = JSONResponse(body, status, headers=dict(headers or {}))


class ClientGone(Exception):
    """Nobody is waiting for the response."""


def create_app(
    engine: Engine,
    config: ServeConfig = ServeConfig(),  # noqa: B008 (frozen)
    model: str = "fastspec",
) -> FastAPI:
    """The application of one engine; its lifespan begins and ends the engine's thread.

    Args:
        model: its name, unless config has one.
    Raises:
        ValueError: a file or variable of API keys has none.
    """
    model = config.served_model_name or model
    metrics = ServerMetrics(engine, model)
    thread, prompts = EngineThread(engine), PromptMaker(engine, config)
    own = engine.drafter.name if engine.drafter is not None else "none"
    drafters = {str(name): name for name in engine.drafters if name is not None}
    drafters |= {own: None} if own not in drafters else {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        with suppress(asyncio.CancelledError):  # a second Ctrl-C, which ends what drains
            yield
        await thread.stop()

    async def failed(request: Request, error: Exception) -> JSONResponse:
        metrics.responses.labels("500").inc()  # it is answered outside of the Guard
        headers = {name.decode(): value.decode() for name, value in _HEADERS}
        body = error_body(500, "internal error; see the server's log")
        return JSONResponse(body, 500, headers)

    handlers: Any = {HTTPException: _refused, Refused: _refused, Exception: failed}
    off: Any = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}
    app = FastAPI(lifespan=lifespan, exception_handlers=handlers, **off)
    for path, kind, of_kind in (
        ("/v1/completions", "completion", Endpoint),
        ("/v1/chat/completions", "chat", Endpoint),
        ("/predict", "predict", Endpoint),
        ("/tokenize", "tokenize", TokensEndpoint),
        ("/detokenize", "detokenize", TokensEndpoint),
    ):
        endpoint = of_kind(kind, thread, prompts, metrics, config, model, drafters)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))

    methods = {name: engine.drafters[drafter] for name, drafter in drafters.items()}
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "fastspec",
        "max_model_len": engine.max_model_len,
        "speculation": {"default": own, "methods": methods},
        "has_chat_template": getattr(engine.tokenizer, "chat_template", None) is not None,
    }

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def one_model(name: str) -> JSONResponse:
        _check_model(name, model)
        return JSONResponse(card)

    @app.api_route("/health", methods=_READ)
    async def health() -> JSONResponse:
        if not thread.is_alive:
            return JSONResponse({"status": "the engine has stopped"}, 503)
        return JSONResponse({"status": "ok"})

    @app.api_route("/version", methods=_READ)
    async def version() -> JSONResponse:
        return JSONResponse({"version": fastspec.__version__})

    @app.api_route("/metrics", methods=_READ)
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    page = files("fastspec.serve").joinpath("page.html").read_text(encoding="utf-8")
    page_headers = {"Content-Security-Policy": _policy(page), "Cache-Control": "no-cache"}

    @app.api_route("/", methods=_READ)
    async def home() -> HTMLResponse:
        return HTMLResponse(page, headers=page_headers)

    guarded = {"hosts": _allowed_hosts(config), "api_keys": config.api_keys()}
    app.add_middleware(Guard, **guarded, metrics=metrics)
    return app


class Guard:
    """Checks the Host header and the API key. It also counts responses and adds headers."""

    def __init__(
        self,
        app: Any,
        hosts: frozenset[str] | None,
        api_keys: tuple[str, ...],
        metrics: ServerMetrics,
    ):
        self._app = app
        self._hosts = hosts
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(str(message["status"])).inc()
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        headers = dict(scope["headers"])
        try:
            self._check(scope["path"], headers)
        except Refused as error:
            await error.response(dict(scope), receive, counted)
        else:
            await self._app(scope, receive, counted)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._hosts is not None:
            named = headers.get(b"host", b"").decode("latin-1").strip().lower()
            host = re.sub(r":\d+$", "", named)  # without its port
            if host not in self._hosts:
                message = f"the Host header names {host!r:.80}; allow it with --allowed-host"
                raise Refused(403, message)
        if self._digests and path not in _OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            digest = hashlib.sha256(key.strip()).digest()
            known = [hmac.compare_digest(digest, each) for each in self._digests]
            if scheme.lower() != b"bearer" or not any(known):
                message = "expected a valid API key: Authorization: Bearer KEY"
                raise Refused(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class Endpoint:
    """One kind of request, from its body to the last byte of its response, as an ASGI application.

    It generates the response while listening for the end of the connection; if the connection ends
    or the time is up, the generation is aborted.
    """

    kind: str
    thread: EngineThread
    prompts: PromptMaker
    metrics: ServerMetrics
    config: ServeConfig
    model: str
    drafters: Mapping[str, str | None]

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        stream = Stream(send)
        work = asyncio.ensure_future(self._answer(scope, receive, stream))
        late = None
        try:
            await asyncio.wait({work}, timeout=self.config.request_timeout)
            if not work.done():
                seconds = self.config.request_timeout
                late = Refused(504, f"the response took more than {seconds:g} seconds", "timeout")
        except asyncio.CancelledError:  # the server has waited for --drain-timeout
            late = Refused(503, "the server is shutting down")
        finally:
            work.cancel()
            await asyncio.wait({work})
        try:
            if late is not None:
                raise late
            response = work.result()
        except ClientGone:
            return
        except Refused as error:
            response = error.response
        except EngineFailure as error:
            response = Refused(500, f"{error}; see the server's log").response
        if not stream.has_begun:
            if response is not None:
                await response(dict(scope), receive, send)
        elif response is not None:  # an error in the middle of a stream
            last = server_event(bytes(response.body).decode()) + server_event("[DONE]")
            end = asyncio.ensure_future(stream.write(last, is_last=True))
            await asyncio.wait({end}, timeout=_LAST_WORDS)
            end.cancel()

    async def _answer(
        self, scope: Mapping[str, Any], receive: Receive, stream: "Stream"
    ) -> Response | None:
        """The response, unless it was streamed; Refused, ClientGone or EngineFailure."""
        start = perf_counter()
        asked = self._parse(await self._body(scope, receive))
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._run(asked, stream, start))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            return work.result()
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work})

    async def _body(self, scope: Mapping[str, Any], receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":  # also what keeps other sites' forms out
            raise Refused(415, "Content-Type: expected application/json")
        most = self.config.max_body_bytes
        too_long = Refused(413, f"the body has more than {most} bytes")
        if int(headers.get(b"content-length", b"0")) > most:
            raise too_long
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > most:
                raise too_long
            if not message.get("more_body"):
                return bytes(body)

    def _bad_request(
        self, why: Exception | str, given: Set[str], code: str | None = None
    ) -> Refused:
        code = "context_length_exceeded" if isinstance(why, PromptTooLong) else code
        return Refused(400, str(why), code, param=field_of(str(why), given, FIELDS[self.kind]))

    def _parse(self, body: bytes) -> Any:
        """What `_read` makes of a body; Refused for what it cannot read."""
        parsed: dict[str, Any] = {}
        try:
            parsed = parse_body(body)
            asked = self._read(parsed)
        except ValueError as error:
            given = {name for name, value in parsed.items() if value is not None}
            raise self._bad_request(error, given) from error
        _check_model(parsed.get("model"), self.model)
        return asked

    def _read(self, parsed: Mapping[str, Any]) -> Any:
        if self.kind == "predict":
            prompt, expected = parsed.get("prompt"), 'an object like {"prompt": "a text"}'
            require("body", [*parsed], {*parsed} == {"prompt"}, expected)
            require("prompt", prompt, isinstance(prompt, str), "a text")
            num_tokens = min(_PREDICT_TOKENS, self.config.max_completion_tokens)
            params = SamplingParams(max_tokens=num_tokens, top_k=10, top_p=0.9)
            return ParsedRequest([str(prompt)], params, fields=parsed.keys())
        return (chat if self.kind == "chat" else completion)(parsed, self.config, self.drafters)

    def _check_room(self, num_texts: int) -> None:
        most = self.config.max_requests
        if self.thread.num_texts + num_texts > most:
            message = f"the limit of {most} texts at a time is reached; try again later"
            raise Refused(429, message, "server_busy", _RETRY_AFTER)

    async def _open(self, asked: ParsedRequest) -> Generation:
        prompts = [asked.prompts] if self.kind == "chat" else asked.prompts
        num_texts, most = len(prompts) * asked.params.n, self.config.max_requests
        if num_texts > most:
            message = f"n: the server generates up to {most} texts at a time"
            raise self._bad_request(message, asked.fields)
        self._check_room(num_texts)
        try:
            makers, prediction = self._makers(prompts, asked.template), asked.params.prediction
            if prediction is not None:
                prediction = partial(self.prompts.prediction_ids, prediction)
            return await self.thread.open(makers, asked.params, asked.is_open_ended, prediction)
        except (ValueError, RecursionError) as error:
            raise self._bad_request(error, asked.fields) from error

    def _makers(
        self, prompts: Sequence[Any], template: Mapping[str, Any] | None
    ) -> list[Callable[[], list[int]]]:
        """Functions that make each prompt's ids; ValueError for a text that must be too long."""
        if template is not None:
            return [partial(self.prompts.chat_ids, each, template) for each in prompts]
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                with telling_which(place, len(prompts), "prompt"):
                    self.prompts.check_length(prompt)
        return [partial(self._ids_of, prompts, place) for place in range(len(prompts))]

    def _ids_of(self, prompts: Sequence[Any], place: int) -> list[int]:
        """The ids of one of a request's prompts; an error says which of several."""
        with telling_which(place, len(prompts), "prompt"):
            return self.prompts.ids(prompts[place])

    async def _run(self, asked: ParsedRequest, stream: "Stream", start: float) -> Response | None:
        """Send tokens as they are generated, or wait for all of them."""
        engine, num_tokens = self.thread.engine, asked.params.num_speculative_tokens
        if num_tokens is None:
            num_tokens = engine.drafters[asked.params.drafter]
        decode = cache(partial(token_text, engine.tokenizer))
        reads = self.kind == "chat" and self.prompts.reads_replies
        if reads:  # response templates look for special tokens
            asked = replace(asked, params=replace(asked.params, skip_special_tokens=False))
        generation = await self._open(asked)
        if asked.echo:
            asked = replace(asked, prompts=[self.prompts.text_read(each) for each in asked.prompts])
        given = self.kind == "chat", self.model, asked, num_tokens, decode, generation
        answer = ReplyBuilder(*given)
        outputs: list[RequestOutput] = []
        times = self.metrics.request(start)
        try:
            if reads and asked.stream:
                read = partial(self.prompts.reply_readers, asked)
                answer.readers = await self.thread.convert(read)
            async for now, events in generation.steps():
                times.note(now, events)
                outputs += [event.output for event in events if event.output is not None]
                if broken := next((each for each in outputs if each.error is not None), None):
                    message, code = str(broken.error), "generation_failed"
                    if broken.is_request_error:
                        raise self._bad_request(message, asked.fields, code)
                    raise Refused(500, message, code)
                if asked.stream:
                    await stream.write(answer.chunks(events))
                else:
                    for event in events:
                        answer.add(event)
            times.end(perf_counter())
            if asked.stream:
                await stream.write(answer.last_chunks(), is_last=True)
                return None
            if reads:
                read = partial(self.prompts.replies, asked, outputs)
                answer.messages = await self.thread.convert(read)
            return JSONResponse(outputs[0].text if self.kind == "predict" else answer.whole())
        finally:
            self.thread.close(generation)


class TokensEndpoint(Endpoint):
    """An endpoint that generates nothing: the thread for prompts makes its response."""

    def _read(self, parsed: Mapping[str, Any]) -> Any:
        return (tokenize if self.kind == "tokenize" else detokenize)(parsed)

    async def _run(self, asked: Any, stream: "Stream", start: float) -> Response:
        self._check_room(1)
        prompts = self.prompts
        convert = prompts.tokenized if self.kind == "tokenize" else prompts.detokenized
        try:
            return JSONResponse(await self.thread.convert(partial(convert, asked)))
        except (ValueError, RecursionError) as error:
            raise self._bad_request(error, asked.fields) from error


class Stream:
    """A response that is sent as it is generated, as server-sent events."""

    def __init__(self, send: Send):
        self._send = send
        self.has_begun = False

    async def write(self, body: bytes, is_last: bool = False) -> None:
        """Send a part; waits for a client that reads slowly."""
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _refused(request: Request, error: HTTPException | Refused) -> Response:
    if isinstance(error, Refused):
        return error.response
    body = error_body(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_model(name: Any, model: str) -> None:
    if name is not None and name != model:
        message = f"model: expected {model!r}, got {name!r:.80}"
        raise Refused(404, message, "model_not_found", param="model")


def _allowed_hosts(config: ServeConfig) -> frozenset[str] | None:
    """Names that are accepted in the Host header; None = any."""
    given = {name.lower() for name in config.allowed_host}
    if "*" in given:
        return None
    if is_loopback(config.host):
        return frozenset({"localhost", "127.0.0.1", "[::1]", config.host.lower(), *given})
    return frozenset(given) or None


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _policy(page: str) -> str:
    """The page's content security policy: its own script and style, and requests to this server."""
    hashes = {}
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
