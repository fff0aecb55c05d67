"""The HTTP application of the model APIs: keys, retries, disconnects, streaming.

Knows the dialects and :class:`burnish.agents.calls.Backend`, nothing of training. All routes exist
with and without ``/v1``, and below ``/s/<name>``, the prefix of one episode: clients differ in what
they append to a base URL.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import (
    Arrival,
    Backend,
    CallError,
    Delta,
    Dialect,
    ErrorKind,
    EventWriter,
    ModelCall,
    ModelReply,
    ReplyStart,
)
from burnish.agents.openai_chat import ChatCompletions, Completions
from burnish.agents.openai_responses import Responses
from burnish.json_text import json_object
from burnish.serve.guard import RequestGuard, while_connected

MAX_MESSAGES = 10_000
MAX_DEPTH = 100
"""Maximum depth of lists and objects in a request."""
_LARGE = 1 << 16
"""Requests with more bytes are parsed in a thread."""
WAIT_S = 5.0
"""Time after which a stream begins with a sign of life. Earlier errors have an HTTP status."""

_KINDS: dict[int, ErrorKind] = {
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    429: "rate_limit_error",
}


class Resolve(Protocol):
    """Finds the backend of a key."""

    def __call__(self, key: str | None, name: str | None) -> Backend:
        """Return the backend. ``name``: the part of the path after ``/s/``, if there is one.

        Raises CallError: 401 for an unknown or missing key, 410 for a closed episode.
        """
        ...


@dataclass(frozen=True)
class _Api:
    """One API: its path, its dialect, and its sign of life in a stream."""

    path: str
    dialect: Dialect
    waiting: str = ": waiting\n\n"


_MESSAGES = Messages()
CHAT = _Api("chat/completions", ChatCompletions())
ANTHROPIC = _Api("messages", _MESSAGES, 'event: ping\ndata: {"type": "ping"}\n\n')
APIS = (CHAT, _Api("completions", Completions()), ANTHROPIC, _Api("responses", Responses()))


class AgentApp:
    """The application. ``asgi`` is the ASGI application."""

    def __init__(
        self,
        resolve: Resolve,
        guard: RequestGuard,
        *,
        health: Callable[[], Mapping[str, Any]] | None = None,
        wait_s: float | None = None,
    ) -> None:
        """``health`` returns the body of ``/health``: ``ready``, and more to show. ``wait_s``: see
        :data:`WAIT_S`."""
        self._resolve, self.guard = resolve, guard
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._state = health or (lambda: {"ready": True})
        guard.refusal = self._refused
        routes = [Route("/health", self._health, methods=["GET"])]
        for prefix in ("", "/v1", "/s/{name}", "/s/{name}/v1"):
            routes += [
                Route(f"{prefix}/{api.path}", partial(self._call, api), methods=["POST"])
                for api in APIS
            ]
            count = f"{prefix}/messages/count_tokens"
            routes += [
                Route(count, self._count_tokens, methods=["POST"]),
                Route(f"{prefix}/models", self._models, methods=["GET"]),
                Route(f"{prefix}/models/{{model:path}}", self._model, methods=["GET"]),
            ]
        handlers = {HTTPException: self._refused, CallError: self._refused}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    # ---- requests --------------------------------------------------------------------------

    def _backend(self, request: Request) -> Backend:
        """Return the backend of a request's key: a bearer token, or ``x-api-key``."""
        name = request.path_params.get("name")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [bearer.strip()] if scheme.lower() == "bearer" else []
        keys += [request.headers["x-api-key"]] if "x-api-key" in request.headers else []
        if len(set(keys)) == 2:  # clients take a second key from the environment
            try:
                return self._resolve(keys[0], name)
            except CallError as error:
                if error.status != 401:
                    raise
        return self._resolve(keys[-1] if keys else None, name)

    async def _read(
        self, request: Request, read: Callable[..., ModelCall], backend: Backend
    ) -> tuple[ModelCall, bytes, Arrival]:
        """Return the call in the body of a request, the digest of the body, and the call's place.
        ``read``: method of a dialect."""
        async with self.guard.json_body(request) as body:
            arrival = backend.arrive()
            digest = blake2b(request.url.path.encode() + b"\0" + body, digest_size=16).digest()
            content = bytes(body)

            def parse() -> ModelCall:
                return read(parse_json(content), max_messages=MAX_MESSAGES)

            try:
                call = await asyncio.to_thread(parse) if len(body) > _LARGE else parse()
            except BaseException:
                arrival.passed()
                raise
            return call, digest, arrival

    async def _call(self, api: _Api, request: Request) -> Response:
        backend = self._backend(request)
        call, digest, arrival = await self._read(request, api.dialect.read, backend)
        count = request.headers.get("x-stainless-retry-count", "")
        live = _Live()
        answering = asyncio.create_task(
            backend.respond(
                call,
                digest=digest,
                is_retry=count.isdecimal() and len(count) < 9 and int(count) > 0,
                progress=live if call.stream else None,
                arrival=arrival,
            )
        )
        answering.add_done_callback(lambda _: arrival.passed())  # also if it never began
        answer = _Answer(backend, digest, answering, live)
        try:
            events: set[asyncio.Future[Any]] = {answering, live.begun}
            first = asyncio.wait(
                events,
                timeout=self._wait_s if call.stream else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            await while_connected(request, first)
            if answering.done():
                answering.result()
                if await request.is_disconnected():
                    raise HTTPException(400, "the connection closed before the reply")
        except BaseException:
            answer.give_up()
            raise
        if call.stream:
            return _EventStream(api, call, answer, self._wait_s)
        return answer.response(api, call)

    async def _count_tokens(self, request: Request) -> Response:
        backend = self._backend(request)
        call, _, arrival = await self._read(request, _MESSAGES.read_count, backend)
        arrival.passed()
        count = await while_connected(request, backend.count_tokens(call))
        return JSONResponse(_MESSAGES.write_count(count))

    async def _models(self, request: Request) -> Response:
        models = [_model(name) for name in self._backend(request).models]
        listed = {"object": "list", "data": models, "has_more": False}
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
        return JSONResponse({**listed, **ends})

    async def _model(self, request: Request) -> Response:
        name, models = request.path_params["model"], self._backend(request).models
        if name not in models:
            message = f"there is no model {name!r}; there is {', '.join(models)}"
            raise CallError(message, status=404, kind="not_found_error", param="model")
        return JSONResponse(_model(name))

    async def _health(self, _: Request) -> Response:
        """Return the health status. No key is needed."""
        state = self._state()
        return JSONResponse(dict(state), status_code=200 if state["ready"] else 503)

    async def _refused(self, request: Request, error: Exception) -> Response:
        """Return an error in the form of the API that the request was for."""
        api = _api_of(request)
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):
            headers = dict(error.headers or {})
            kind = _KINDS.get(error.status_code, "invalid_request_error")
            wait = headers.get("Retry-After")
            error = CallError(
                str(error.detail),
                status=error.status_code,
                kind=kind if error.status_code < 500 else "api_error",
                retry_after_s=None if wait is None else float(wait),
            )
        assert isinstance(error, CallError)
        headers["x-should-retry"] = "false" if error.retry_after_s is None else "true"
        if error.retry_after_s is not None:
            headers["Retry-After"] = f"{error.retry_after_s:g}"
        body = api.dialect.error(error)
        return JSONResponse(body, status_code=error.status, headers=headers)


def _model(name: str) -> dict[str, Any]:
    """Describe a model in the forms of OpenAI and of Anthropic at once."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(0))
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "burnish",
        "type": "model",
        "display_name": name,
        "created_at": created,
    }


def _api_of(request: Request) -> _Api:
    path = request.url.path
    for api in (ANTHROPIC, *APIS[::-1]):
        if path.endswith(f"/{api.path}") or f"/{api.path}/" in path:
            return api
    return ANTHROPIC if "anthropic-version" in request.headers else CHAT


# ---- replies -----------------------------------------------------------------------------------


class _Live:
    """The text of a reply that is being sampled. Implements
    :class:`burnish.agents.calls.Progress`."""

    def __init__(self) -> None:
        self.head: ReplyStart | None = None
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set by the first delta."""
        self.deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        """None: the reply is there."""

    def start(self, start: ReplyStart) -> None:
        self.head = start

    def add(self, delta: Delta) -> None:
        self.deltas.put_nowait(delta)
        if not self.begun.done():
            self.begun.set_result(None)


@dataclass(frozen=True)
class _Answer:
    """The answer to one call, and what must happen if nobody gets it."""

    backend: Backend
    digest: bytes
    task: asyncio.Task[ModelReply]
    live: _Live

    def give_up(self) -> None:
        """Cancel the call, or report its reply as not delivered."""
        if not self.task.done():
            self.task.cancel()
        elif not self.task.cancelled() and self.task.exception() is None:
            self.backend.undelivered(self.task.result(), self.digest)

    def response(self, api: _Api, call: ModelCall) -> Response:
        """Return the reply as JSON."""
        reply = self.task.result()
        return JSONResponse(api.dialect.write(call, reply), headers=_headers(reply))

    @property
    def has_start(self) -> bool:
        """Return whether :attr:`start` is known."""
        return self.live.head is not None or self.task.done()

    @property
    def start(self) -> ReplyStart:
        """Return the part of the reply that is known first."""
        return self.live.head or self.task.result().start


def _headers(reply: ModelReply | ReplyStart) -> dict[str, str]:
    headers = {"x-request-id": _ascii(reply.reply_id)}
    if reply.ignored:
        headers["burnish-ignored"] = _ascii(", ".join(reply.ignored))
    return headers


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


class _EventStream(StreamingResponse):
    """A reply as server-sent events, which begin before the reply is complete."""

    def __init__(self, api: _Api, call: ModelCall, answer: _Answer, wait_s: float) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if answer.has_start:
            headers |= _headers(answer.start)
        self._sent = False
        self._answer = answer
        events = self._events(api, call, wait_s)
        super().__init__(events, media_type="text/event-stream", headers=headers)

    async def _events(self, api: _Api, call: ModelCall, wait_s: float) -> AsyncIterator[str]:
        task, deltas = self._answer.task, self._answer.live.deltas
        task.add_done_callback(lambda _: deltas.put_nowait(None))
        writer: EventWriter | None = None
        try:
            async for delta in _until_none(deltas, wait_s):
                if delta is None:
                    yield api.waiting
                    continue
                writer = writer or api.dialect.writer(call, self._answer.start)
                for event in writer.add(delta):
                    yield event
            reply = task.result()
            writer = writer or api.dialect.writer(call, reply.start)
            for event in writer.finish(reply):
                yield event
        except CallError as error:
            yield api.dialect.error_event(error)
            return
        self._sent = True

    async def __call__(self, scope: Any, receive: Any, send: Callable[..., Awaitable[Any]]) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._sent:
                self._answer.give_up()


async def _until_none(
    deltas: asyncio.Queue[Delta | None], wait_s: float
) -> AsyncIterator[Delta | None]:
    """Yield the items of a queue up to the first None, and None after each ``wait_s`` seconds
    without one."""
    while True:
        try:
            async with asyncio.timeout(wait_s):
                delta = await deltas.get()
        except TimeoutError:
            yield None
            continue
        if delta is None:
            return
        yield delta


# ---- JSON --------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """Return the value of a request body. Raises CallError (400) if it is not JSON, contains a
    number that is not finite or an object with a key twice, or is nested deeper than
    :data:`MAX_DEPTH`."""
    try:
        value = json.loads(
            body,
            parse_constant=_not_finite,
            parse_float=_finite,
            object_pairs_hook=json_object,
        )
    except (ValueError, RecursionError) as error:
        raise _not_json(f"the request is not valid JSON: {error}") from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return value
    raise _not_json(f"the request is nested deeper than {MAX_DEPTH} levels")


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _not_finite(text)


def _not_finite(text: str) -> float:
    raise ValueError(f"{text[:20]} is not a finite number")


def _not_json(message: str) -> CallError:
    return CallError(message, status=400, kind="invalid_request_error")
